// The custom-call target of collectives between the CPU devices of one process.
#pragma once

#include "xla/target.h"

namespace purlin::xla_ffi {

Target cpu_target();

// A program that uses several processes is being lowered: its calls are counted anew.
void begin_program();

}  // namespace purlin::xla_ffi
