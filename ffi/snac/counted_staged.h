// The regime of counted collectives that goes through staging, in as many rounds as the longest
// stream of any rank needs.
#pragma once

#include <cstdint>

#include "snac/epoch.h"
#include "snac/staged.h"
#include "snac/streams.h"

namespace purlin {

// The staging of a counted call: as many boxes as there are streams that differ, of equal size. All
// ranks find the same figures.
template <class Packet>
struct CountedStaging {
  const Call<Packet>& call;
  int block, blocks, boxes;
  int64_t part, chunk;  // bytes of a block's part of a half, and of a box in it; 0: too small

  PURLIN_HD CountedStaging(const Call<Packet>& call, int block, int blocks)
      : call(call),
        block(block),
        blocks(blocks),
        boxes(call.counted.splits_input ? call.world : 1),
        part(part_bytes(call.staging_used, blocks)),
        chunk(part / (boxes * call.operands) / kShareUnit * kShareUnit) {}

  // Rounds of a call in which no rank sends a peer more than `most` rows.
  PURLIN_HD int64_t rounds(int64_t most) const {
    int64_t longest = 0;
    for (int o = 0; o < call.operands; ++o) {
      const int64_t bytes = share(run_of(call.operand[o], most).bytes(), kShareUnit, blocks, 0).end;
      if (bytes > longest) longest = bytes;
    }
    return longest > chunk ? (longest + chunk - 1) / chunk : 1;
  }
  // What this block moves in round k of a stream.
  PURLIN_HD Range slice(const Plan& stream, int64_t k) const {
    const Range mine = share(stream.bytes(), kShareUnit, blocks, block);
    const int64_t first = mine.begin + k * chunk;
    const int64_t last = first + chunk < mine.end ? first + chunk : mine.end;
    return {first, first < last ? last : first};
  }
  // Where byte 0 of a stream would lie, if the bytes of `slice` lie in rank q's box number b.
  PURLIN_RANK char* box(int q, uint64_t epoch, int o, int b, Range slice) const {
    return call.staging(q, epoch) + block * part + (o * boxes + b) * chunk - slice.begin;
  }
};

template <class Atom, class Consumer, class Block>
PURLIN_RANK void staged_counted(Block& block, const Call<typename Atom::Packet>& call,
                                const Consumer& consumer = Consumer()) {
  const Counted& of = call.counted;
  Counts& counts = block.shared().counts;
  const CountedStaging<typename Atom::Packet> staging(call, block.index(), block.count());
  uint64_t epoch = enter(block, call);
  count_sends(block, call);
  int64_t most = 0;  // of what this rank sends to any peer, then of what any rank does
  for (int p = 0; p < call.world; ++p) most = counts.send[p] > most ? counts.send[p] : most;
  const int64_t staged = most;
  int64_t rounds = 1;
  for (int64_t k = 0; k < rounds; ++k, ++epoch) {
    for (int o = 0; o < call.operands; ++o)
      for (int b = 0; b < staging.boxes; ++b) {
        const Operand& operand = call.operand[o];
        const Plan plan = run_of(operand, of.splits_input ? counts.send[b] : staged);
        const Range slice = staging.slice(plan, k);
        const char* src = operand.src + counts.send_at[b] * operand.row_bytes;
        Atom::copy(block, one_move(staging.box(call.rank, epoch, o, b, slice), src), plan, slice);
      }
    if (k > 0) {
      await_peers(block, call, epoch);
    } else {
      block.sync();
      exchange(
          block, call, epoch, kCountWords + 1,
          [&](int w, int p) {
            return w < kCountWords ? count_word(of, counts, w, p) : static_cast<uint64_t>(staged);
          },
          [&](int w, int q, uint64_t word) {
            if (w < kCountWords)
              learn_count(of, counts, w, q, word);
            else
              counts.most[q] = static_cast<int64_t>(word);
          });
      block.sync();
      for (int q = 0; q < call.world; ++q)
        if (q != call.rank && counts.most[q] > most) most = counts.most[q];
      rounds = staging.rounds(most);
      count_receives(block, call);
    }
    const int box = of.splits_input ? call.rank : 0;
    for (int o = 0; o < call.operands; ++o) {
      Operand operand = call.operand[o];
      if constexpr (Consumer::kReduces) {
        operand.plan = run_of(operand, counts.receive[call.rank]);
        const Range slice = staging.slice(operand.plan, k);
        const char* from[kMaxRanks];
        for (int q = 0; q < call.world; ++q) from[q] = staging.box(q, epoch, o, box, slice);
        consumer.pull(block, call, operand, from, slice);
      } else {
        for (int turn = 0; turn < call.world; ++turn) {
          const int q = (call.rank + 1 + block.index() + turn) % call.world;
          const Plan plan = run_of(operand, counts.receive[q]);
          const Range slice = staging.slice(plan, k);
          char* to = operand.dst + counts.receive_at[q] * operand.row_bytes;
          Atom::copy(block, one_move(to, staging.box(q, epoch, o, box, slice)), plan, slice);
        }
      }
    }
  }
  leave(block, call, epoch - 1);
  fill(block, call, counts);
}

}  // namespace purlin
