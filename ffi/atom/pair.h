// The 16-byte packet of GPUs, eight bytes of payload and eight of flag, and the 128-byte line.
#pragma once

#include <cstdint>

namespace purlin {

struct alignas(16) Pair {
  uint64_t low;
  uint64_t high;
};

struct alignas(128) Line {
  Pair piece[8];
};

// What packets and lines of GPUs are made of.
struct CudaForms {
  using Word = uint64_t;
  using Packet = Pair;  // payload below, flag above

  static constexpr bool kLines = true;
  static constexpr int kLineThreads = 8;
  static constexpr int kLineWords = 2 * kLineThreads - 1;  // the last word is the flag
};

}  // namespace purlin
