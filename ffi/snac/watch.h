// What a kernel and the host tell each other about waits: plain data.
#pragma once

#include <cstdint>

#include "snac/call.h"

namespace purlin {

enum class Alarm : uint32_t { kNone, kSlow, kExpired, kDisagree, kBadCounts, kLost };

// What the poison of a window says: a rank has given up, or a process has ended.
inline constexpr uint64_t kGivenUp = 1, kEnded = 2;  // the latter plus its number

// How long a wait may last, in device memory: many threads look at it at once, and over PCIe that
// would make this rank late, then its peer, and so on. The host may change it while kernels run.
struct Limits {
  uint64_t budget_ns;  // 0: no end
  uint64_t slow_ns;
};

// One for each device, in pinned host memory. `alarm` is written last and releases the rest.
struct Report {
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
  int32_t group;  // of the watch
  Phase phase;
  Fault fault;  // of counts: `seen` is its value and `expected` its limit
};

struct Watch {
  Report* report;        // as the device sees it
  const Limits* limits;  // device memory
  uint64_t* calls;       // device memory: counts this collective in this regime
  int32_t row;
  int32_t group;  // the host's number for the ranks
};

}  // namespace purlin
