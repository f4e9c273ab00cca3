// The orchestration: Stage, Notify, And Consume, once for each regime, over any Block and any Atom.
//
// Block c of a rank waits for block c of its peers alone. A call waits on every peer before it ends
// and advances the epoch by one on every rank; so a peer is at most one call ahead, and two halves
// of packets suffice without a trailing barrier.
#pragma once

#include <cstdint>

#include "snac/call.h"
#include "snac/consume.h"
#include "snac/epoch.h"
#include "snac/tag.h"

namespace purlin {

enum class Regime : uint8_t { kMeet, kPacket, kZeroStaging };

template <class Block, class Packet>
PURLIN_RANK void prefetch_first(const Call<Packet>& call, const Stride<Block>& stride) {
  const Operand& operand = call.operand[0];
  const int64_t at = operand.plan.src_step * call.peer(1) + stride.first * 8;
  if (stride.first * 8 < operand.plan.bytes()) prefetch(operand.src + at);
}

// Small: data and flag travel in one store, into the peers' windows. One one-way hop.
template <class Atom, class Consumer, class Block>
PURLIN_RANK void packet(Block& block, const Call<typename Atom::Packet>& call,
                        const Consumer& consumer = Consumer()) {
  const int words_together = consumer.words();
  using Word = typename Atom::Word;
  const Stride<Block> stride(block);
  prefetch_first(call, stride);  // beside the read of the epoch
  const uint64_t epoch = enter(block, call);

  int64_t first = 0;
  for (int o = 0; o < call.operands; ++o) {
    const Operand& operand = call.operand[o];
    const Plan& plan = operand.plan;
    const int64_t words = Words<Word, char>::count(plan);
    for (int step = 1; step < call.world; ++step) {
      const int p = call.peer(step);
      const Words<Word, const char> box(operand.src + p * plan.src_step, plan, plan.src_stride);
      auto* row = call.window[p].row(epoch, call.rank, call.world, call.packet_capacity) + first;
      for (int64_t u = stride.first * words_together; u < words; u += stride.step * words_together)
        for (int64_t i = u; i < u + words_together && i < words; ++i)
          Atom::put_packet(row + i, Atom::make_packet(box.load(i), epoch, call.tag));
    }
    first += words;
  }

  first = 0;
  for (int o = 0; o < call.operands; ++o) {
    consumer.unpack(block, call, call.operand[o], epoch, first);
    first += Words<Word, char>::count(call.operand[o].plan);
  }
  block.sync();
  leave(block, call, epoch);
}

// Large, where peers see each other's arrays: the notify word carries the addresses, peers read
// straight from them, and the exit rendezvous keeps the arrays alive until every reader is done.
template <class Atom, class Consumer, class Block>
PURLIN_RANK void zero_staging(Block& block, const Call<typename Atom::Packet>& call,
                              const Consumer& consumer = Consumer()) {
  const uint64_t epoch = enter(block, call);
  const uint64_t flag = flag_of(epoch, call.tag);
  const int c = block.index();
  auto& from = block.shared().from;

  for (int p = block.thread(); p < call.world; p += block.threads()) {
    if (p == call.rank) continue;
    for (int o = 0; o < call.operands; ++o)
      block.announce(&call.window[p].control->ready[c][call.rank][o],
                     reinterpret_cast<uint64_t>(call.operand[o].src), flag);
  }
  for (int p = block.thread(); p < call.world; p += block.threads()) {
    for (int o = 0; o < call.operands; ++o) {
      const char* src = call.operand[o].src;
      if (p != call.rank)
        src = reinterpret_cast<const char*>(
            block.receive(&call.control().ready[c][p][o], flag, {Phase::kEnter, p}));
      from[o][p] = src + call.rank * call.operand[o].plan.src_step;
    }
  }
  block.sync();
  for (int o = 0; o < call.operands; ++o) consumer.pull(block, call, call.operand[o], from[o]);
  block.sync();

  for (int p = block.thread(); p < call.world; p += block.threads())
    if (p != call.rank) block.signal(&call.window[p].control->done[c][call.rank], epoch);
  for (int p = block.thread(); p < call.world; p += block.threads())
    if (p != call.rank) block.await(&call.control().done[c][p], epoch, {Phase::kLeave, p});
  leave(block, call, epoch);
}

// On a host where all ranks have met already: the meeting was the notify, and no array is given
// back before all are done, so nothing waits. `from` holds, for each operand, the ranks' blocks.
template <class Consumer, class Block, class Packet>
PURLIN_RANK void meet(Block& block, const Call<Packet>& call, const Consumer& consumer,
                      const char* const (*from)[kMaxRanks]) {
  for (int o = 0; o < call.operands; ++o) consumer.pull(block, call, call.operand[o], from[o]);
}

// The same where all ranks get the same result (packed to packed): rank 0's part is made once, and
// copied to the others while it is in the cache.
template <class Atom, class Consumer, class Block, class Packet>
PURLIN_RANK void meet_once(Block& block, const Call<Packet>& first, const Consumer& consumer,
                           const char* const (*from)[kMaxRanks],
                           char* const (*results)[kMaxRanks]) {
  for (int o = 0; o < first.operands; ++o) {
    const Plan& plan = first.operand[o].plan;
    const Range part = share(plan.bytes(), kShareUnit, block.count(), block.index());
    consumer.pull(block, first, first.operand[o], from[o]);
    for (int r = 1; r < first.world; ++r)
      Atom::copy(block, results[o][r], first.operand[o].dst, plan, part);
  }
}

}  // namespace purlin
