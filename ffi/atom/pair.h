// The 16-byte packet of GPUs: eight bytes of payload and eight of flag.
#pragma once

#include <cstdint>

namespace purlin {

struct alignas(16) Pair {
  uint64_t low;
  uint64_t high;
};

}  // namespace purlin
