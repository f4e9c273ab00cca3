// What a kernel tells the host about a wait that does not end: plain data in pinned memory.
#pragma once

#include <cstdint>

#include "snac/call.h"

namespace purlin {

enum class Alarm : uint32_t { kNone, kSlow, kExpired, kDisagree };

// One for each device. The host writes the budgets, also while kernels run; a kernel writes the
// record and then, releasing it, `alarm`.
struct Report {
  uint64_t budget_ns;  // 0: no end
  uint64_t slow_ns;
  uint64_t alarm;
  uint64_t epoch;  // of the call: its number on the window
  uint64_t expected;
  uint64_t seen;
  uint64_t tag;
  int32_t row;
  int32_t rank;
  int32_t world;
  int32_t peer;
  int32_t block;
  Phase phase;
};

struct Watch {
  Report* report;    // as the device sees it
  uint64_t* calls;   // device memory: counts this collective in this regime
  int32_t row;
};

}  // namespace purlin
