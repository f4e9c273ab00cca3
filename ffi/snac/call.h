// Everything that one rank needs to run one collective: passed by value to a kernel.
#pragma once

#include <cstdint>

#include "layout/plan.h"
#include "snac/counts.h"
#include "snac/window.h"

namespace purlin {

struct Operand {
  const char* src = nullptr;
  char* dst = nullptr;
  Plan plan;              // of a counted collective: what one peer may get at most
  int64_t row_bytes = 0;  // of the leading axis
};

// What to add to an operand's addresses for each rank to see the same memory.
struct Lent {
  int64_t src[kMaxRanks] = {};
  int64_t dst[kMaxRanks] = {};
};

// What small calls need comes first: a GPU fetches the parameters of each call anew, line by line.
template <class Packet>
struct Call {
  int32_t rank = 0;
  int32_t world = 1;
  int32_t operands = 0;
  uint32_t tag = 0;  // of the call site: ranks that run different calls must not meet
  Capacity capacity;
  Window<Packet> window[kMaxRanks];
  Operand operand[kMaxOperands];
  int64_t staging_used = 0;  // bytes of one half of the staging that this call may use
  int32_t depth = 0;         // stages of the Atom's ring; 0: as many as it has
  int32_t fold = 0;          // number of a reduction whose types are known as it runs
  int32_t item_bytes = 1;    // of its elements
  int64_t packet_bytes = 0;  // of a counted stream that travels in packets, at most
  Counted counted;           // of collectives whose counts are data
  Lent lent[kMaxOperands];   // where ranks are of several processes

  PURLIN_HD Control& control() const { return window[rank].control(); }
  // The part of rank q's staging that belongs to `epoch`.
  PURLIN_HD char* staging(int q, uint64_t epoch) const {
    return window[q].staging(epoch, world, capacity);
  }
  // Where rank p sees the address of an operand.
  PURLIN_HD uint64_t src_for(int p, int o, const char* at) const {
    return reinterpret_cast<uint64_t>(at) + lent[o].src[p];
  }
  PURLIN_HD uint64_t dst_for(int p, int o) const {
    return reinterpret_cast<uint64_t>(operand[o].dst) + lent[o].dst[p];
  }
  PURLIN_HD int peer(int step) const {
    const int p = rank + step;  // step is at most world
    return p < world ? p : p - world;
  }
};

// Where a wait stands, for the report when it never ends.
enum class Phase : int32_t { kEnter, kPacket, kLeave };

struct Where {
  Phase phase;
  int32_t peer;
  Fault fault = Fault::kNone;
};

}  // namespace purlin
