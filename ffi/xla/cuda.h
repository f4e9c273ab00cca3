// The custom-call target of collectives between the GPUs of one process.
#pragma once

#include "xla/target.h"

namespace purlin::xla_ffi {

Target cuda_target();

}  // namespace purlin::xla_ffi
