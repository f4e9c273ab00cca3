// Which boxes a copy goes through: one for each of several ranks, with the same plan.
#pragma once

#include <cstdint>

#include "layout/host_device.h"

namespace purlin {

// Where the boxes of ranks lie: at addresses in a table, or at equal steps.
template <class Byte>
struct Boxes {
  Byte* const* table = nullptr;
  Byte* base = nullptr;
  int64_t step = 0;

  PURLIN_HD Byte* operator[](int p) const { return table != nullptr ? table[p] : base + p * step; }
};

// From src[p] to dst[p] for `count` ranks p = first, first + 1, ... of `world`, around. The last
// one of several is the rank's own.
struct Moves {
  Boxes<char> dst;
  Boxes<const char> src;
  int first = 0;
  int world = 1;
  int count = 1;

  PURLIN_HD int rank(int i) const { return first + i < world ? first + i : first + i - world; }
  PURLIN_HD Moves part(int begin, int end) const {
    return {dst, src, rank(begin), world, end - begin};
  }
};

// From one box to another.
PURLIN_HD inline Moves one_move(char* dst, const char* src) {
  return {{nullptr, dst, 0}, {nullptr, src, 0}, 0, 1, 1};
}

}  // namespace purlin
