// The Python module of the CUDA side: its custom-call target, the domain and its reports.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "domain/peer/domain.h"
#include "domain/peer/watcher.h"
#include "domain/vmm/memory.h"
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
  return xla_ffi::counts([](int row, int regime) {
    int64_t sum = 0;
    for (const peer::Domain* domain : peer::Domain::all()) sum += domain->calls(row, regime);
    return sum;
  });
}

// The domain of the GPUs of this process, or of several.
peer::Domain& domain_of(bool joined) {
  if (!joined) return peer::Domain::start();
  if (peer::Domain* domain = peer::Domain::running(true)) return *domain;
  throw std::runtime_error("the processes have not been joined");
}

void join(int process, int count, const std::string& name, const std::string& token,
          const std::vector<std::pair<int64_t, int>>& devices, bool lends, double seconds) {
  peer::Domain::join({process, count, name, token, devices, lends, seconds});
}

// Whether memory at an address of a GPU can be mapped by other processes.
bool can_share(uint64_t address) {
  try {
    return vmm::exported(vmm::range_of(reinterpret_cast<const void*>(address)).base).get() >= 0;
  } catch (const std::exception&) {
    return false;
  }
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
      "start", [](const std::vector<int>& ordinals) { peer::Domain::start(ordinals); },
      nb::call_guard<nb::gil_scoped_release>(),
      "Reserve an arena, open peer access and load every kernel, on these GPUs; once.");
  m.def(
      "count",
      [] {
        int count = 0;
        return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
      },
      "GPUs that this process sees; starts nothing.");
  m.def("devices", &devices);
  m.def("join", &join, nb::call_guard<nb::gil_scoped_release>(),
        "Share the memory of the GPUs [(id, ordinal)] with other processes; once.");
  m.def("can_share", &can_share);
  m.def("lends", [] { return domain_of(true).lends(); });
  m.def(
      "can_peer",
      [](const std::vector<int64_t>& ids, bool joined) { return domain_of(joined).can_peer(ids); },
      nb::arg("ids"), nb::arg("joined") = false);
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
      [](const std::vector<int64_t>& partition, int world, bool joined) {
        peer::Domain& domain = domain_of(joined);
        return domain.reserve(partition, world) < 0 ? domain.full() : "";
      },
      nb::arg("partition"), nb::arg("world"), nb::arg("joined") = false,
      nb::call_guard<nb::gil_scoped_release>(),
      "Windows for a partition of the devices, given by ids; says why if there is no room.");
  m.def("calls", &calls);
  m.def("set_limits", [](double slow_s, double budget_s) {
    for (peer::Domain* domain : peer::Domain::all()) domain->set_limits(slow_s, budget_s);
  });
  m.def("last_report", &peer::last_report);
}
