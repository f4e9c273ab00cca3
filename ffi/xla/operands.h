// Reads the operands of a custom call into box plans.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "domain/site.h"
#include "layout/derive.h"
#include "snac/window.h"
#include "xla/ffi/api/ffi.h"

namespace purlin::xla_ffi {

namespace ffi = ::xla::ffi;

struct Buffers {
  std::vector<const char*> src;
  std::vector<char*> dst;
  std::vector<Plan> plans;
  int item_bytes = 1;
};

// Plans of all operands, checked against the results. Throws std::invalid_argument.
inline Buffers read_buffers(const Site& site, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Collective& row = site.collective();
  const size_t n = args.size();
  if (n == 0 || n > static_cast<size_t>(kMaxOperands) || rets.size() != n ||
      site.split.size() != n || site.concat.size() != n)
    throw std::invalid_argument("a call takes 1 to " + std::to_string(kMaxOperands) +
                                " operands, as many results and axes");
  Buffers buffers;
  for (size_t i = 0; i < n; ++i) {
    const auto x = args.get<ffi::AnyBuffer>(i).value();
    auto y = rets.get<ffi::AnyBuffer>(i).value();
    const std::vector<int64_t> shape(x.dimensions().begin(), x.dimensions().end());
    const std::vector<int64_t> out(y->dimensions().begin(), y->dimensions().end());
    const Axes axes{static_cast<int>(site.split[i]), static_cast<int>(site.concat[i])};
    if (result_shape(row, shape, site.world, axes) != out)
      throw std::invalid_argument(std::string(row.name) + ": the result has an unexpected shape");
    const int64_t item_bytes = static_cast<int64_t>(ffi::ByteWidth(x.element_type()));
    buffers.item_bytes = static_cast<int>(item_bytes);
    buffers.plans.push_back(derive(row, shape, item_bytes, site.world, axes));
    buffers.src.push_back(static_cast<const char*>(x.untyped_data()));
    buffers.dst.push_back(static_cast<char*>(y->untyped_data()));
  }
  return buffers;
}

}  // namespace purlin::xla_ffi
