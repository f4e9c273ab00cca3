// Reads the operands of a custom call into box plans.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "domain/site.h"
#include "layout/derive.h"
#include "snac/counts.h"
#include "snac/window.h"
#include "xla/ffi/api/ffi.h"

namespace purlin::xla_ffi {

namespace ffi = ::xla::ffi;

struct Buffers {
  std::vector<const char*> src;
  std::vector<char*> dst;
  std::vector<Plan> plans;
  std::vector<int64_t> row_bytes;
  Counted counted;
  int item_bytes = 1;
};

inline std::vector<int64_t> shape_of(const ffi::AnyBuffer& x) {
  return {x.dimensions().begin(), x.dimensions().end()};
}

// An array of one integer for each rank.
inline const void* read_counts(const Site& site, const ffi::AnyBuffer& x, bool wide) {
  const auto type = wide ? ffi::DataType::S64 : ffi::DataType::S32;
  if (x.element_type() != type || shape_of(x) != std::vector<int64_t>{site.world})
    throw std::invalid_argument(std::string(site.collective().name) +
                                ": counts are arrays of an int32 or an int64 for each rank");
  return x.untyped_data();
}

// Arguments: operands, sizes, then what the site says that it brings. Results: those of the
// operands, and the rows received from each rank.
inline Counted read_counted(const Site& site, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Collective& row = site.collective();
  size_t next = site.split.size();
  const bool wide = args.get<ffi::AnyBuffer>(next).value().element_type() == ffi::DataType::S64;
  const auto take = [&] {
    return read_counts(site, args.get<ffi::AnyBuffer>(next++).value(), wide);
  };
  Counted counted;
  counted.wide = wide;
  counted.sizes = take();
  if (site.expects) counted.expected = take();
  if (site.placed) counted.from = take(), counted.to = take();
  ffi::AnyBuffer received = *rets.get<ffi::AnyBuffer>(site.split.size()).value();
  read_counts(site, received, wide);
  counted.received = received.untyped_data();
  counted.rows_in = shape_of(args.get<ffi::AnyBuffer>(0).value()).at(0);
  counted.most = site.most < 0 ? counted.rows_in : std::min(site.most, counted.rows_in);
  counted.rows_out = shape_of(*rets.get<ffi::AnyBuffer>(0).value()).at(0);
  counted.splits_input = row.splits_input();
  counted.splits_output = row.splits_output();
  counted.reduces = row.consume == Consume::kReduce;
  counted.fill = site.fill;
  return counted;
}

// Plans of all operands, checked against the results. Throws std::invalid_argument.
inline Buffers read_buffers(const Site& site, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Collective& row = site.collective();
  const size_t n = site.split.size();
  const size_t counts = !row.counted ? 0 : 1 + site.expects + 2 * site.placed;
  if (n == 0 || n > static_cast<size_t>(kMaxOperands) || site.concat.size() != n ||
      args.size() != n + counts + (site.keeps ? n : 0) || rets.size() != n + row.counted)
    throw std::invalid_argument("a call takes 1 to " + std::to_string(kMaxOperands) +
                                " operands, as many results and axes");
  Buffers buffers;
  if (row.counted) buffers.counted = read_counted(site, args, rets);
  for (size_t i = 0; i < n; ++i) {
    const auto x = args.get<ffi::AnyBuffer>(i).value();
    auto y = rets.get<ffi::AnyBuffer>(i).value();
    std::vector<int64_t> shape = shape_of(x), out = shape_of(*y);
    const Axes axes{static_cast<int>(site.split[i]), static_cast<int>(site.concat[i])};
    const int64_t item_bytes = static_cast<int64_t>(ffi::ByteWidth(x.element_type()));
    const int64_t rows = row.counted ? buffers.counted.rows_out : 0;
    if (result_shape(row, shape, site.world, axes, rows) != out)
      throw std::invalid_argument(std::string(row.name) + ": the result has an unexpected shape");
    if (row.counted && shape[0] != buffers.counted.rows_in)
      throw std::invalid_argument(std::string(row.name) +
                                  ": operands of one call need as many rows as each other");
    if (row.counted) shape[0] = buffers.counted.most;
    buffers.item_bytes = static_cast<int>(item_bytes);
    buffers.plans.push_back(derive(row, shape, item_bytes, site.world, axes));
    int64_t row_bytes = item_bytes;
    for (size_t d = 1; d < shape.size(); ++d) row_bytes *= shape[d];
    buffers.row_bytes.push_back(row_bytes);
    buffers.src.push_back(static_cast<const char*>(x.untyped_data()));
    buffers.dst.push_back(static_cast<char*>(y->untyped_data()));
  }
  return buffers;
}

}  // namespace purlin::xla_ffi
