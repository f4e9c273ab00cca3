// The custom-call target of collectives between the CPU devices of one process.
#pragma once

#include "xla/target.h"

namespace purlin::xla_ffi {

Target cpu_target();

}  // namespace purlin::xla_ffi
