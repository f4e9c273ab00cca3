// Entering and leaving a call: the epoch lives in the window, never in the host.
#pragma once

#include <cstdint>

#include "snac/call.h"

namespace purlin {

// The epoch of the call that this block is entering.
template <class Block, class Packet>
PURLIN_RANK uint64_t enter(const Block& block, const Call<Packet>& call) {
  return call.control().epoch[block.index()] + 1;
}

// After a barrier of the block at which all threads have entered: the next call on the window comes
// after this one anyhow. A wider grid may use the window then, so the words that no block of this
// grid owns advance too.
template <class Block, class Packet>
PURLIN_RANK void leave(const Block& block, const Call<Packet>& call, uint64_t epoch) {
  const int stride = block.count();
  PURLIN_ROLLED
  for (int word = block.index() + block.thread() * stride; word < kMaxBlocks;
       word += block.threads() * stride)
    call.control().epoch[word] = epoch;
  block.record();
}

}  // namespace purlin
