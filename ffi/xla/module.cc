// The Python module: custom-call targets, the layout table and the counters.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "domain/counters.h"
#include "layout/derive.h"
#include "layout/dtypes.h"
#include "snac/window.h"
#include "xla/cpu.h"

namespace nb = nanobind;
using namespace purlin;

namespace {

const Collective& row_of(const std::string& op) {
  const int row = find_collective(op);
  if (row < 0) throw nb::value_error(("no collective is called '" + op + "'").c_str());
  return kCollectives[row];
}

nb::capsule capsule(void* address) { return nb::capsule(address); }

nb::dict targets() {
  const auto cpu = xla_ffi::cpu_target();
  nb::dict stages, type, result;
  stages["instantiate"] = capsule(cpu.instantiate);
  stages["execute"] = capsule(cpu.execute);
  type["type_id"] = capsule(cpu.type_id);
  type["type_info"] = capsule(cpu.type_info);
  result["stages"] = stages;
  result["type"] = type;
  return result;
}

nb::dict table() {
  static constexpr const char* kLayouts[] = {"packed", "scattered", "transposed"};
  nb::dict rows;
  for (const Collective& row : kCollectives) {
    nb::dict fields;
    fields["input"] = kLayouts[static_cast<int>(row.input)];
    fields["output"] = kLayouts[static_cast<int>(row.output)];
    fields["consume"] = row.consume == Consume::kCopy ? "copy" : "reduce";
    rows[std::string(row.name).c_str()] = fields;
  }
  return rows;
}

nb::dict calls() {
  nb::dict all;
  for (int row = 0; row < kNumCollectives; ++row)
    for (int regime = 0; regime < kNumRegimes; ++regime)
      if (const int64_t n = Counters::instance().get(row, regime); n > 0)
        all[nb::make_tuple(std::string(kCollectives[row].name), kRegimeNames[regime])] = n;
  return all;
}

nb::list names_of_reductions() {
  nb::list names;
#define PURLIN_ROW(row, functor) names.append(#row);
  PURLIN_REDUCE_OPS(PURLIN_ROW)
#undef PURLIN_ROW
  return names;
}

nb::list names_of_dtypes() {
  nb::list names;
#define PURLIN_ROW(row, item, accumulator) names.append(#row);
  PURLIN_REDUCE_DTYPES(PURLIN_ROW)
#undef PURLIN_ROW
  return names;
}

nb::dict plan(const std::string& op, const std::vector<int64_t>& shape, int64_t item_bytes,
              int world, int split, int concat) {
  const Plan p = derive(row_of(op), shape, item_bytes, world, {split, concat});
  nb::dict fields;
  nb::list outer;
  for (int i = 0; i < kMaxOuter; ++i)
    if (p.extent[i] != 1)
      outer.append(nb::make_tuple(p.extent[i], p.src_stride[i], p.dst_stride[i]));
  fields["run"] = p.run;
  fields["outer"] = outer;
  fields["src_step"] = p.src_step;
  fields["dst_step"] = p.dst_step;
  fields["bytes"] = p.bytes();
  return fields;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native part of purlin_jax.";
  m.attr("ffi_api") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("max_ranks") = kMaxRanks;
  m.attr("max_operands") = kMaxOperands;
  m.attr("collectives") = table();
  m.attr("reductions") = nb::tuple(names_of_reductions());
  m.attr("reduce_dtypes") = nb::tuple(names_of_dtypes());
  m.def("targets", &targets, "Capsules of the custom-call target and its state, for JAX.");
  m.def("calls", &calls, "{(op, regime): number of ranks that ran it} since the start.");
  m.def(
      "result_shape",
      [](const std::string& op, const std::vector<int64_t>& shape, int world, int split,
         int concat) { return result_shape(row_of(op), shape, world, {split, concat}); },
      nb::arg("op"), nb::arg("shape"), nb::arg("world"), nb::arg("split"), nb::arg("concat"));
  m.def("plan", &plan, nb::arg("op"), nb::arg("shape"), nb::arg("item_bytes"), nb::arg("world"),
        nb::arg("split"), nb::arg("concat"));
}
