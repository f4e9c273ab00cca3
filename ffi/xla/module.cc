// The Python module: custom-call targets, the layout table and the counters.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "domain/counters.h"
#include "domain/shm/domain.h"
#include "domain/threads/room.h"
#include "layout/derive.h"
#include "layout/dtypes.h"
#include "snac/window.h"
#include "xla/binding.h"
#include "xla/cpu.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
using namespace purlin;

namespace {

#ifdef __clang__
constexpr const char* kCompiler = __VERSION__;  // begins with its name
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

const Collective& row_of(const std::string& op) {
  const int row = find_collective(op);
  if (row < 0) throw nb::value_error(("no collective is called '" + op + "'").c_str());
  return kCollectives[row];
}

nb::dict table() {
  static constexpr const char* kLayouts[] = {"packed", "scattered", "transposed"};
  nb::dict rows;
  for (const Collective& row : kCollectives) {
    nb::dict fields;
    fields["input"] = kLayouts[static_cast<int>(row.input)];
    fields["output"] = kLayouts[static_cast<int>(row.output)];
    fields["consume"] = row.consume == Consume::kCopy ? "copy" : "reduce";
    fields["counted"] = row.counted;
    rows[std::string(row.name).c_str()] = fields;
  }
  return rows;
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
  fields["src_packed"] = p.is_packed(p.src_stride);
  fields["dst_packed"] = p.is_packed(p.dst_stride);
  return fields;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native part of purlin_jax.";
  m.attr("ffi_api") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("compiler") = kCompiler;
  m.attr("max_ranks") = kMaxRanks;
  m.attr("max_operands") = kMaxOperands;
  m.attr("collectives") = table();
  m.attr("regimes") = xla_ffi::regimes();
  m.attr("without_lending") = xla_ffi::without_lending();
  m.attr("reduces") = xla_ffi::reduces(threads::reduces);
  m.def(
      "targets", [] { return xla_ffi::as_dict(xla_ffi::cpu_target()); },
      "Capsules of the custom-call target and its state, for JAX.");
  m.def(
      "calls",
      [] {
        return xla_ffi::counts(
            [](int row, int regime) { return Counters::instance().get(row, regime); });
      },
      "{(op, regime): number of ranks that ran it} since the start.");
  m.def("set_limits", &threads::set_limits, nb::arg("slow_s"), nb::arg("budget_s"));
  m.def("last_report", &threads::last_report);
  m.def("begin_call", &xla_ffi::begin_call, nb::arg("ordinal"), nb::arg("site"), nb::arg("tag"),
        nb::arg("cached"));
  m.def(
      "join",
      [](int process, int count, const std::string& name, const std::string& token,
         int64_t arena_bytes, double seconds) {
        shm::Domain::start(process, count, name, token, arena_bytes, seconds);
        threads::set_process(process);
      },
      nb::arg("process"), nb::arg("count"), nb::arg("name"), nb::arg("token"),
      nb::arg("arena_bytes"), nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>(),
      "Share memory with the other processes of this host, which wait for process 0.");
  m.def(
      "result_shape",
      [](const std::string& op, const std::vector<int64_t>& shape, int world, int split, int concat,
         int64_t rows) { return result_shape(row_of(op), shape, world, {split, concat}, rows); },
      nb::arg("op"), nb::arg("shape"), nb::arg("world"), nb::arg("split"), nb::arg("concat"),
      nb::arg("rows") = 0);
  m.def("plan", &plan, nb::arg("op"), nb::arg("shape"), nb::arg("item_bytes"), nb::arg("world"),
        nb::arg("split"), nb::arg("concat"));
}
