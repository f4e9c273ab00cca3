// Counts how often native code really ran each collective, by op and regime.
#pragma once

#include <cstdint>

#include "layout/collectives.h"
#include "snac/regime.h"

namespace purlin {

// One call is one rank that ran one collective.
struct Counters {
  int64_t calls[kNumCollectives][kNumRegimes] = {};

  void add(int row, Regime regime) {
    __atomic_fetch_add(&calls[row][static_cast<int>(regime)], 1, __ATOMIC_RELAXED);
  }
  int64_t get(int row, int regime) const {
    return __atomic_load_n(&calls[row][regime], __ATOMIC_RELAXED);
  }
  static Counters& instance() {
    static Counters counters;
    return counters;
  }
};

}  // namespace purlin
