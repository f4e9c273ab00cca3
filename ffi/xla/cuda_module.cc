// The Python module of the CUDA side: its custom-call target, the domain and its reports.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "domain/peer/domain.h"
#include "domain/peer/watcher.h"
#include "xla/binding.h"
#include "xla/cuda.h"

namespace nb = nanobind;
using namespace purlin;

namespace {

nb::list devices() {
  nb::list all;
  for (const peer::Device& device : peer::Domain::start().devices()) {
    nb::dict fields;
    fields["ordinal"] = device.ordinal;
    fields["name"] = device.name;
    fields["capability"] = device.capability;
    fields["multiprocessors"] = device.multiprocessors;
    all.append(fields);
  }
  return all;
}

// {name: least compute capability} of the Atoms in the binary.
nb::dict atoms() {
  nb::dict all;
  for (const AtomKernels& atom : listed_atoms()) all[std::string(atom.name).c_str()] = atom.least;
  return all;
}

nb::dict calls() {
  const peer::Domain* domain = peer::Domain::running();
  if (domain == nullptr) return nb::dict();
  return xla_ffi::counts([&](int row, int regime) { return domain->calls(row, regime); });
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA part of purlin_jax.";
  m.attr("architectures") = PURLIN_ARCHITECTURES;
  m.attr("compiler") = "nvcc " PURLIN_NVCC_VERSION;
  m.attr("toolkit") = CUDART_VERSION;
  m.attr("reduces") = xla_ffi::reduces([](const char* op, const char* dtype) {
    return find_kernel({"generic", Regime::kZeroStaging, Consume::kReduce, op, dtype}).function !=
           nullptr;
  });
  m.attr("atoms") = atoms();
  m.def("targets", [] { return xla_ffi::as_dict(xla_ffi::cuda_target()); });
  m.def(
      "start", [] { peer::Domain::start(); }, nb::call_guard<nb::gil_scoped_release>(),
      "Reserve an arena, open peer access and load every kernel, on every GPU; once.");
  m.def("devices", &devices);
  m.def("can_peer",
        [](const std::vector<int>& ordinals) { return peer::Domain::start().can_peer(ordinals); });
  m.def("arena", [] {
    const peer::Domain& domain = peer::Domain::start();
    return nb::make_tuple(domain.arena_used(), domain.arena_bytes());
  });
  m.def(
      "capacity",
      [](int world) {
        const Capacity capacity = peer::Domain::capacity(world);
        nb::dict bytes;
        bytes["packet"] = capacity.packets * int64_t{sizeof(CudaForms::Word)};
        bytes["line"] = capacity.lines * int64_t{sizeof(CudaForms::Word)} * CudaForms::kLineWords;
        return bytes;
      },
      "Bytes from one rank to another that the windows of a group hold, by regime.");
  m.def(
      "reserve",
      [](const std::vector<int64_t>& partition, int world) {
        peer::Domain::start().reserve(partition, world);
      },
      "Windows for a partition of the devices, given by ordinals; RuntimeError when the arena is "
      "full.");
  m.def("calls", &calls);
  m.def("set_limits",
        [](double slow_s, double budget_s) { peer::Domain::start().set_limits(slow_s, budget_s); });
  m.def("last_report", &peer::last_report);
}
