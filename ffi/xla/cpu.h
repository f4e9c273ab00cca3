// The custom-call target of collectives between the CPU devices of one process.
#pragma once

#include <cstdint>
#include <string>

#include "xla/target.h"

namespace purlin::xla_ffi {

Target cpu_target();

// A call between several processes is being lowered: custom calls made of it are counted anew. Its
// program may be `cached`: compiled by another process.
void begin_call(int64_t ordinal, const std::string& text, uint64_t tag, bool cached);

}  // namespace purlin::xla_ffi
