// The regimes of collectives whose counts are data: rows of the leading axis, as many for each peer
// as it says. Counts travel with the notify, so no rank need know another's, and no host knows any.
//
// Every block moves a share of every stream (what one rank sends to another), so that blocks have
// equal work however uneven the streams are; and each starts at another peer, so that near and far
// memory, and all links, are busy at once.
#pragma once

#include <cstdint>

#include "snac/call.h"
#include "snac/consume.h"
#include "snac/epoch.h"
#include "snac/notify.h"
#include "snac/regime.h"
#include "snac/staged.h"

namespace purlin {

// `rows` rows of an operand as a box.
PURLIN_HD inline Plan run_of(const Operand& operand, int64_t rows) {
  Plan plan;
  plan.run = rows * operand.row_bytes;
  return plan;
}

template <class Block>
PURLIN_RANK Range own_share(const Block& block, const Plan& plan) {
  return share(plan.bytes(), kShareUnit, block.count(), block.index());
}

// What this rank sends, checked; ends with a barrier.
template <class Block, class Packet>
PURLIN_RANK void count_sends(Block& block, const Call<Packet>& call) {
  const Counted& of = call.counted;
  Counts& counts = block.shared().counts;
  for (int p = block.thread(); p < call.world; p += block.threads()) {
    counts.send[p] = of.read(of.sizes, p);
    counts.send_at[p] = of.send_at(p);
    block.refuse(of.check_send(counts, p), p);
    if (p != call.rank) continue;
    counts.receive[p] = counts.send[p];
    if (of.to != nullptr) counts.receive_at[p] = of.read(of.to, p);
  }
  block.sync();
}

// The words that tell a peer how much it gets, and where it belongs if the sender says so.
inline constexpr int kCountWords = 2;

PURLIN_HD inline uint64_t count_word(const Counted& of, const Counts& counts, int w, int p) {
  if (w == 0) return static_cast<uint64_t>(counts.send[p]);
  return of.to != nullptr ? static_cast<uint64_t>(of.read(of.to, p)) : 0;
}
PURLIN_HD inline void learn_count(const Counted& of, Counts& counts, int w, int q, uint64_t word) {
  if (w == 0) counts.receive[q] = static_cast<int64_t>(word);
  if (w == 1 && of.to != nullptr) counts.receive_at[q] = static_cast<int64_t>(word);
}

// What this rank receives, checked, after a barrier at which all has been heard; ends with another.
template <class Block, class Packet>
PURLIN_RANK void count_receives(Block& block, const Call<Packet>& call) {
  const Counted& of = call.counted;
  Counts& counts = block.shared().counts;
  for (int q = block.thread(); q < call.world; q += block.threads()) {
    if (of.to == nullptr) counts.receive_at[q] = of.receive_at(counts, q);
    block.refuse(of.check_receive(counts, call.rank, q), q);
    if (block.index() == 0) of.write_received(q, counts.receive[q]);
  }
  block.sync();
}

// Zeros in [begin, end) of `at`, which is this block's part.
template <class Block>
PURLIN_RANK void clear(const Block& block, char* at, Range part) {
  const int64_t before = -(reinterpret_cast<int64_t>(at) + part.begin) & 15;
  const int64_t wide = part.begin + before < part.end ? part.begin + before : part.end;
  const int64_t narrow = wide + (part.end - wide) / 16 * 16;
  for (int64_t i = part.begin + block.thread(); i < wide; i += block.threads()) at[i] = 0;
  for (int64_t i = wide + 16 * block.thread(); i < narrow; i += 16 * block.threads())
    *reinterpret_cast<Pair*>(at + i) = {0, 0};
  for (int64_t i = narrow + block.thread(); i < part.end; i += block.threads()) at[i] = 0;
}

// Zeros in the rows that nobody writes.
template <class Block, class Packet>
PURLIN_RANK void fill(const Block& block, const Call<Packet>& call, const Counts& counts) {
  const Counted& of = call.counted;
  if (!of.fill) return;
  for (int64_t at = of.solid(counts, call.world); at < of.rows_out;) {
    const Gap gap = of.gap(counts, call.world, at);
    for (int o = 0; o < call.operands; ++o) {
      const Operand& operand = call.operand[o];
      char* rows = operand.dst + at * operand.row_bytes;
      clear(block, rows, own_share(block, run_of(operand, gap.end - at)));
    }
    at = gap.next;
  }
}

// Reads the ranks' streams where they lie: from[o][q] is what rank q has for this one.
template <class Atom, class Consumer, class Block, class Packet>
PURLIN_RANK void consume_counted(Block& block, const Call<Packet>& call, const Consumer& consumer,
                                 const Counts& counts, const char* const (*from)[kMaxRanks]) {
  for (int o = 0; o < call.operands; ++o) {
    Operand operand = call.operand[o];
    if constexpr (Consumer::kReduces) {
      operand.plan = run_of(operand, counts.receive[call.rank]);
      consumer.pull(block, call, operand, from[o], own_share(block, operand.plan));
    } else {
      for (int turn = 0; turn < call.world; ++turn) {
        const int q = (call.rank + 1 + block.index() + turn) % call.world;
        const Plan plan = run_of(operand, counts.receive[q]);
        char* to = operand.dst + counts.receive_at[q] * operand.row_bytes;
        Atom::copy(block, one_move(to, from[o][q]), plan, own_share(block, plan));
      }
    }
  }
  fill(block, call, counts);
}

// Calls use(i, word) for the words that this thread takes of what rank q sent: those from `at` on
// in its row of packets.
template <class Atom, class Block, class Use>
PURLIN_RANK void for_each_packet(Block& block, const Call<typename Atom::Packet>& call, int q,
                                 uint64_t epoch, int at, int words, Use use) {
  using Packet = typename Atom::Packet;
  const Stride<Block> stride(block);
  const uint64_t expected = Atom::flag(epoch, call.tag);
  const Packet* packets = Packets<Atom>::row(call, call.rank, q, epoch) + at;
  for (int i = stride.first; i < words; i += stride.step) {
    Packet packet;
    while (Atom::flag_of(packet = Atom::get_packet(packets + i)) != expected)
      block.stalled({Phase::kPacket, q}, expected, Atom::flag_of(packet));
    block.relax();
    use(i, Atom::payload(packet));
  }
}

template <class Atom, template <class, class> class View, class Consumer, class Block>
PURLIN_RANK void packet_counted(Block& block, const Call<typename Atom::Packet>& call,
                                const Consumer& consumer = Consumer()) {
  using Word = typename Atom::Word;
  const Counted& of = call.counted;
  Counts& counts = block.shared().counts;
  const Stride<Block> stride(block);
  const uint64_t epoch = enter(block, call);
  count_sends(block, call);
  tell(block, call, epoch, kCountWords, [&](int w, int p) { return count_word(of, counts, w, p); });
  const auto source = [&](int o, int p) {
    const Operand& operand = call.operand[o];
    return operand.src + counts.send_at[p] * operand.row_bytes;
  };
  for (int step = 1; step < call.world; ++step) {
    const int p = call.peer(step);
    auto* row = Packets<Atom>::row(call, p, call.rank, epoch);
    for (int o = 0; o < call.operands; ++o) {
      const Plan plan = run_of(call.operand[o], counts.send[p]);
      const View<Word, const char> box(source(o, p), plan, plan.src_stride);
      const int words = box.count(plan);
      for (int i = stride.first; i < words; i += stride.step)
        Atom::put_packet(row + i, Atom::make_packet(box.template load<Atom>(i), epoch, call.tag));
      row += words;
    }
  }
  hear(block, call, epoch, kCountWords,
       [&](int w, int q, uint64_t word) { learn_count(of, counts, w, q, word); });
  block.sync();
  count_receives(block, call);
  leave(block, call, epoch);

  if constexpr (Consumer::kReduces) {
    int first = 0;
    for (int o = 0; o < call.operands; ++o) {
      Operand operand = call.operand[o];
      operand.plan = run_of(operand, counts.receive[call.rank]);
      operand.src = source(o, call.rank);
      consumer.template unpack<Packets<Atom>, View>(block, call, operand, epoch, first, false, {});
      first += View<Word, char>::count(operand.plan);
    }
  } else {
    for (int step = 1; step <= call.world; ++step) {
      const int q = call.peer(step);
      int first = 0;
      for (int o = 0; o < call.operands; ++o) {
        const Operand& operand = call.operand[o];
        const Plan plan = run_of(operand, counts.receive[q]);
        const int words = View<Word, char>::count(plan);
        const View<Word, char> to(operand.dst + counts.receive_at[q] * operand.row_bytes, plan,
                                  plan.dst_stride);
        if (q != call.rank) {
          for_each_packet<Atom>(block, call, q, epoch, first, words,
                                [&](int i, Word word) { to.store(i, word); });
        } else {
          const View<Word, const char> own(source(o, q), plan, plan.src_stride);
          for (int i = stride.first; i < words; i += stride.step)
            to.store(i, own.template load<Atom>(i));
        }
        first += words;
      }
    }
  }
  fill(block, call, counts);
}

template <class Atom, class Consumer, class Block>
PURLIN_RANK void zero_staging_counted(Block& block, const Call<typename Atom::Packet>& call,
                                      const Consumer& consumer = Consumer()) {
  const Counted& of = call.counted;
  Counts& counts = block.shared().counts;
  auto& from = block.shared().from;
  const uint64_t epoch = enter(block, call);
  count_sends(block, call);
  const auto source = [&](int o, int p) {
    return call.operand[o].src + counts.send_at[p] * call.operand[o].row_bytes;
  };
  if (block.thread() == 0)
    for (int o = 0; o < call.operands; ++o) from[o][call.rank] = source(o, call.rank);
  exchange(
      block, call, epoch, kCountWords + call.operands,
      [&](int w, int p) {
        return w < kCountWords ? count_word(of, counts, w, p)
                               : reinterpret_cast<uint64_t>(source(w - kCountWords, p));
      },
      [&](int w, int q, uint64_t word) {
        if (w < kCountWords)
          learn_count(of, counts, w, q, word);
        else
          from[w - kCountWords][q] = reinterpret_cast<const char*>(word);
      });
  block.sync();
  count_receives(block, call);
  leave(block, call, epoch);
  consume_counted<Atom>(block, call, consumer, counts, from);
  part(block, call, epoch);
}

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

// Any of them, chosen as it runs: for hosts and tests.
template <class Atom, class Consumer, class Block>
PURLIN_RANK void run_waiting_counted(Block& block, Regime regime, bool flat,
                                     const Call<typename Atom::Packet>& call,
                                     const Consumer& consumer) {
  if (regime == Regime::kPacket && flat)
    packet_counted<Atom, FlatWords>(block, call, consumer);
  else if (regime == Regime::kPacket)
    packet_counted<Atom, Words>(block, call, consumer);
  if (regime == Regime::kStaged) staged_counted<Atom>(block, call, consumer);
  if (regime == Regime::kZeroStaging) zero_staging_counted<Atom>(block, call, consumer);
}

}  // namespace purlin
