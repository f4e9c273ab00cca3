// The orchestration: Stage, Notify, And Consume, once for each regime, over any Block and any Atom.
//
// Block c of a rank waits for block c of its peers alone. A call waits on every peer before it ends
// and advances the epoch by the same number on every rank, one for each round; so a peer is at most
// one round ahead, and two halves of packets and of staging suffice without a trailing barrier.
#pragma once

#include <cstdint>

#include "snac/call.h"
#include "snac/consume.h"
#include "snac/epoch.h"
#include "snac/notify.h"
#include "snac/regime.h"
#include "snac/staged.h"

namespace purlin {

template <class Block, class Packet>
PURLIN_RANK void prefetch_first(const Call<Packet>& call, const Stride<Block>& stride) {
  const Operand& operand = call.operand[0];
  const int64_t at = operand.plan.src_step * call.peer(1) + stride.first * 8;
  if (stride.first * 8 < operand.plan.bytes()) prefetch(operand.src + at);
}

// The bytes of a box that this block moves.
template <class Block>
PURLIN_RANK Range own_part(const Block& block, const Plan& plan) {
  return share(plan.bytes(), kShareUnit, block.count(), block.index());
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

// Large, where peers see each other's arrays: the notify words carry the addresses of the inputs,
// peers read straight from them, and the exit rendezvous keeps them alive until all have read.
template <class Atom, class Consumer, class Block>
PURLIN_RANK void zero_staging(Block& block, const Call<typename Atom::Packet>& call,
                              const Consumer& consumer = Consumer()) {
  const uint64_t epoch = enter(block, call);
  auto& from = block.shared().from;
  const auto input = [&](int o) { return reinterpret_cast<uint64_t>(call.operand[o].src); };
  const auto place = [&](int o, int p, uint64_t address) {
    from[o][p] = reinterpret_cast<const char*>(address) + call.rank * call.operand[o].plan.src_step;
  };
  if (block.thread() == 0)
    for (int o = 0; o < call.operands; ++o) place(o, call.rank, input(o));
  exchange(block, call, epoch, call.operands, input, place);
  block.sync();
  for (int o = 0; o < call.operands; ++o) {
    const Operand& operand = call.operand[o];
    consumer.pull(block, call, operand, from[o], own_part(block, operand.plan));
  }
  part(block, call, epoch);
  leave(block, call, epoch);
}

// The same the other way round, for copies: the words carry the addresses of the results, and each
// rank writes what it has for a peer straight to its place.
template <class Atom, class Block>
PURLIN_RANK void zero_staging_push(Block& block, const Call<typename Atom::Packet>& call) {
  const uint64_t epoch = enter(block, call);
  auto& to = block.shared().to;
  const auto result = [&](int o) { return reinterpret_cast<uint64_t>(call.operand[o].dst); };
  const auto place = [&](int o, int p, uint64_t address) {
    to[o][p] = reinterpret_cast<char*>(address) + call.rank * call.operand[o].plan.dst_step;
  };
  if (block.thread() == 0)
    for (int o = 0; o < call.operands; ++o) place(o, call.rank, result(o));
  exchange(block, call, epoch, call.operands, result, place);
  block.sync();
  for (int o = 0; o < call.operands; ++o) {
    const Plan& plan = call.operand[o].plan;
    for (int step = 1; step <= call.world; ++step) {  // the own block comes last
      const int p = call.peer(step);
      Atom::copy(block, to[o][p], call.operand[o].src + p * plan.src_step, plan,
                 own_part(block, plan));
    }
  }
  part(block, call, epoch);
  leave(block, call, epoch);
}

// Any of the regimes above, chosen as it runs: for hosts and tests, since it holds the code of all.
template <class Atom, class Consumer, class Block>
PURLIN_RANK void run_waiting(Block& block, Regime regime, const Call<typename Atom::Packet>& call,
                             const Consumer& consumer) {
  switch (regime) {
    case Regime::kMeet: break;
    case Regime::kPacket: return packet<Atom>(block, call, consumer);
    case Regime::kStaged: return staged<Atom>(block, call, consumer);
    case Regime::kZeroStaging: return zero_staging<Atom>(block, call, consumer);
    case Regime::kZeroStagingPush: return zero_staging_push<Atom>(block, call);
    case Regime::kComposed: return composed<Atom>(block, call, consumer);
  }
}

// On a host where all ranks have met already: the meeting was the notify, and no array is given
// back before all are done, so nothing waits. `from` holds, for each operand, the ranks' blocks.
template <class Consumer, class Block, class Packet>
PURLIN_RANK void meet(Block& block, const Call<Packet>& call, const Consumer& consumer,
                      const char* const (*from)[kMaxRanks]) {
  for (int o = 0; o < call.operands; ++o) {
    const Operand& operand = call.operand[o];
    consumer.pull(block, call, operand, from[o], own_part(block, operand.plan));
  }
}

// The same where all ranks get the same result (packed to packed): rank 0's part is made once, and
// copied to the others while it is in the cache.
template <class Atom, class Consumer, class Block, class Packet>
PURLIN_RANK void meet_once(Block& block, const Call<Packet>& first, const Consumer& consumer,
                           const char* const (*from)[kMaxRanks],
                           char* const (*results)[kMaxRanks]) {
  for (int o = 0; o < first.operands; ++o) {
    const Plan& plan = first.operand[o].plan;
    const Range part = own_part(block, plan);
    consumer.pull(block, first, first.operand[o], from[o], part);
    for (int r = 1; r < first.world; ++r)
      Atom::copy(block, results[o][r], first.operand[o].dst, plan, part);
  }
}

}  // namespace purlin
