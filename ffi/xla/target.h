// Addresses that a registration of a custom-call target with XLA needs.
#pragma once

namespace purlin::xla_ffi {

struct Target {
  void* instantiate;
  void* execute;
  void* type_id;
  void* type_info;
};

}  // namespace purlin::xla_ffi
