// The regimes that go through staging: peers read copies in the windows, never each other's arrays.
//
// A call is cut into rounds, each with an epoch of its own. A round stages a chunk in the half of
// its parity, tells the peers, waits until they have done the same, and consumes their chunks. A
// peer tells of round k + 1 only after it has consumed round k; so whoever has heard of k + 1 from
// all may overwrite the half of k. What fits one half is a single round.
#pragma once

#include <cstdint>

#include "snac/call.h"
#include "snac/epoch.h"
#include "snac/notify.h"
#include "snac/regime.h"

namespace purlin {

// How a block's part of the staging is divided. All ranks find the same figures.
struct Rounds {
  int64_t count = 0;                  // 0: the staging is too small
  int64_t chunk[kMaxOperands] = {};   // bytes of a box that a block stages in one round
  int64_t offset[kMaxOperands] = {};  // of an operand's first box in the block's part
};

// What one of `blocks` blocks has of a half.
inline PURLIN_HD int64_t part_bytes(int64_t staging, int blocks) {
  return staging / blocks / kShareUnit * kShareUnit;
}

// For `boxes[o]` boxes of at most bytes[o] bytes in each operand, shared by `blocks` blocks.
PURLIN_COLD_HD inline Rounds divide(int operands, const int64_t* bytes, const int* boxes,
                                    int blocks, int64_t staging) {
  Rounds rounds;
  int64_t all = 0, least = 0, share_of[kMaxOperands] = {};
  for (int o = 0; o < operands; ++o) {
    share_of[o] = whole_units(share(bytes[o], kShareUnit, blocks, 0).end);  // block 0 has the most
    all += boxes[o] * share_of[o];
    least += boxes[o] * kShareUnit;
  }
  const int64_t room = part_bytes(staging, blocks);
  if (room >= all)
    rounds.count = 1;
  else if (room > least)
    rounds.count = (all + room - least - 1) / (room - least);
  else
    return rounds;
  int64_t next = 0;
  for (int o = 0; o < operands; ++o) {
    const int64_t even = (share_of[o] + rounds.count - 1) / rounds.count;
    rounds.chunk[o] = whole_units(even);
    rounds.offset[o] = next;
    next += boxes[o] * rounds.chunk[o];
  }
  return rounds;
}

// Bytes of the largest of `world` pieces that a composed reduction cuts `bytes` into.
inline PURLIN_HD int64_t piece_bytes(int64_t bytes, int world) {
  return share(bytes, kShareUnit, world, 0).end;
}

// The rounds of a call in regime kStaged or kComposed.
template <class Packet>
PURLIN_HD Rounds rounds_of(const Call<Packet>& call, int blocks, Regime regime) {
  const bool composed = regime == Regime::kComposed;
  int64_t bytes[kMaxOperands];
  int boxes[kMaxOperands];
  for (int o = 0; o < call.operands; ++o) {
    const Plan& plan = call.operand[o].plan;
    bytes[o] = composed ? piece_bytes(plan.bytes(), call.world) : plan.bytes();
    // Where all peers get the same, it is staged once.
    boxes[o] = composed || plan.src_step != 0 ? call.world : 1;
  }
  return divide(call.operands, bytes, boxes, blocks, call.staging_used);
}

// The view of the staging that a block has in one call.
template <class Block, class Packet>
class Staging {
 public:
  PURLIN_RANK Staging(const Block& block, const Call<Packet>& call, const Rounds& rounds)
      : call_(call),
        rounds_(rounds),
        block_(block.index()),
        blocks_(block.count()),
        part_(part_bytes(call.staging_used, blocks_)) {}

  // The bytes of `whole` that this block moves in round k.
  PURLIN_RANK Range slice(Range whole, int o, int64_t k) const {
    const Range mine = share(whole.end - whole.begin, kShareUnit, blocks_, block_);
    const int64_t end = whole.begin + mine.end, chunk = rounds_.chunk[o];
    const int64_t first = whole.begin + mine.begin + k * chunk;
    const int64_t last = first + chunk < end ? first + chunk : end;
    return {first, first < last ? last : first};
  }

  // Where byte 0 of a packed box would lie, if the bytes of `slice` lie in rank q's box number b.
  PURLIN_RANK char* box(int q, uint64_t epoch, int o, int b, Range slice) const {
    return call_.staging(q, epoch) + block_ * part_ + rounds_.offset[o] + b * rounds_.chunk[o] -
           slice.begin;
  }

 private:
  const Call<Packet>& call_;
  const Rounds& rounds_;
  const int block_, blocks_;
  const int64_t part_;
};

template <class Atom, class Consumer, class Block>
PURLIN_RANK void staged(Block& block, const Call<typename Atom::Packet>& call,
                        const Consumer& consumer = Consumer()) {
  const Rounds rounds = rounds_of(call, block.count(), Regime::kStaged);
  const Staging<Block, typename Atom::Packet> staging(block, call, rounds);
  uint64_t epoch = enter(block, call);
  for (int64_t k = 0; k < rounds.count; ++k, ++epoch) {
    for (int o = 0; o < call.operands; ++o) {
      const Operand& operand = call.operand[o];
      const Plan plan = operand.plan.packed_destination();
      const Range slice = staging.slice({0, plan.bytes()}, o, k);
      const int boxes = plan.src_step != 0 ? call.world : 1;
      const Moves moves = {{nullptr, staging.box(call.rank, epoch, o, 0, slice), rounds.chunk[o]},
                           {nullptr, operand.src, plan.src_step},
                           0,
                           boxes,
                           boxes};
      Atom::copy(block, moves, plan, slice);
    }
    await_peers(block, call, epoch);
    for (int o = 0; o < call.operands; ++o) {
      Operand operand = call.operand[o];
      const int box = operand.plan.src_step != 0 ? call.rank : 0;
      operand.plan = operand.plan.packed_source();
      const Range slice = staging.slice({0, operand.plan.bytes()}, o, k);
      const char* from[kMaxRanks];
      for (int q = 0; q < call.world; ++q) from[q] = staging.box(q, epoch, o, box, slice);
      consumer.pull(block, call, operand, from, slice);
    }
  }
  leave(block, call, epoch - 1);
}

// all_reduce as a reduce_scatter (head) and an all_gather (tail) in one call: rank p reduces piece
// p, and its result goes through the staging (the seam) to all.
template <class Atom, class Consumer, class Block>
PURLIN_RANK void composed(Block& block, const Call<typename Atom::Packet>& call,
                          const Consumer& consumer = Consumer()) {
  const Rounds rounds = rounds_of(call, block.count(), Regime::kComposed);
  const Staging<Block, typename Atom::Packet> staging(block, call, rounds);
  const auto piece = [&](int o, int p) {
    return share(call.operand[o].plan.bytes(), kShareUnit, call.world, p);
  };
  uint64_t epoch = enter(block, call);
  for (int64_t k = 0; k < rounds.count; ++k) {
    for (int o = 0; o < call.operands; ++o)
      for (int p = 0; p < call.world; ++p) {
        const Range slice = staging.slice(piece(o, p), o, k);
        Atom::copy(block, one_move(staging.box(call.rank, epoch, o, p, slice), call.operand[o].src),
                   call.operand[o].plan, slice);
      }
    await_peers(block, call, epoch);
    for (int o = 0; o < call.operands; ++o) {
      const Range slice = staging.slice(piece(o, call.rank), o, k);
      Operand seam = call.operand[o];
      seam.dst = staging.box(call.rank, epoch + 1, o, 0, slice);
      const char* from[kMaxRanks];
      for (int q = 0; q < call.world; ++q) from[q] = staging.box(q, epoch, o, call.rank, slice);
      consumer.pull(block, call, seam, from, slice);
    }
    ++epoch;
    await_peers(block, call, epoch);
    for (int o = 0; o < call.operands; ++o)
      for (int step = 1; step <= call.world; ++step) {
        const int q = call.peer(step);
        const Range slice = staging.slice(piece(o, q), o, k);
        Atom::copy(block, one_move(call.operand[o].dst, staging.box(q, epoch, o, 0, slice)),
                   call.operand[o].plan, slice);
      }
    ++epoch;
  }
  leave(block, call, epoch - 1);
}

}  // namespace purlin
