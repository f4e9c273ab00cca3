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

  PURLIN_HD Byte* operator[](int p) const {
    return table != nullptr ? table[p] : base + p * step;
  }
};

// From src[p] to dst[p] for the ranks p = first, first + 1, ... around to all `count`.
struct Moves {
  Boxes<char> dst;
  Boxes<const char> src;
  int first = 0;
  int count = 1;

  PURLIN_HD int rank(int i) const { return first + i < count ? first + i : first + i - count; }
};

// From one box to another.
PURLIN_HD inline Moves one_move(char* dst, const char* src) {
  return {{nullptr, dst, 0}, {nullptr, src, 0}, 0, 1};
}

}  // namespace purlin
