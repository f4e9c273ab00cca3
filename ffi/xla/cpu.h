// The custom-call target of collectives between the CPU devices of one process.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace purlin::xla_ffi {

// Addresses that a registration with XLA needs.
struct CpuTarget {
  void* instantiate;
  void* execute;
  void* type_id;
  void* type_info;
};

CpuTarget cpu_target();

}  // namespace purlin::xla_ffi
