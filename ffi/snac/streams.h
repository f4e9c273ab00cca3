// What the regimes of counted collectives are made of. A stream is what one rank sends another.
#pragma once

#include <cstdint>

#include "snac/call.h"
#include "snac/consume.h"
#include "snac/notify.h"

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

// Reads the streams of the ranks for which wanted(q) where they lie: from[o][q] is what rank q has
// for this one. Reductions want all.
template <class Atom, class Consumer, class Block, class Packet, class Wanted>
PURLIN_RANK void pull_streams(Block& block, const Call<Packet>& call, const Consumer& consumer,
                              const Counts& counts, const char* const (*from)[kMaxRanks],
                              Wanted wanted) {
  for (int o = 0; o < call.operands; ++o) {
    Operand operand = call.operand[o];
    if constexpr (Consumer::kReduces) {
      operand.plan = run_of(operand, counts.receive[call.rank]);
      consumer.pull(block, call, operand, from[o], own_share(block, operand.plan));
    } else {
      for (int turn = 0; turn < call.world; ++turn) {
        const int q = (call.rank + 1 + block.index() + turn) % call.world;
        if (!wanted(q)) continue;
        const Plan plan = run_of(operand, counts.receive[q]);
        char* to = operand.dst + counts.receive_at[q] * operand.row_bytes;
        Atom::copy(block, one_move(to, from[o][q]), plan, own_share(block, plan));
      }
    }
  }
}

// The same for ranks that have met.
template <class Atom, class Consumer, class Block, class Packet>
PURLIN_RANK void meet_counted(Block& block, const Call<Packet>& call, const Consumer& consumer,
                              const Counts& counts, const char* const (*from)[kMaxRanks]) {
  pull_streams<Atom>(block, call, consumer, counts, from, [](int) { return true; });
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

// Where rank p's stream lies in an operand.
PURLIN_HD inline const char* stream_of(const Operand& operand, const Counts& counts, int p) {
  return operand.src + counts.send_at[p] * operand.row_bytes;
}

// Sends a stream in packets: all operands one behind another.
template <class Atom, template <class, class> class View, class Block>
PURLIN_RANK void put_stream(const Block& block, const Call<typename Atom::Packet>& call,
                            const Counts& counts, uint64_t epoch, int p) {
  using Word = typename Atom::Word;
  const Stride<Block> stride(block);
  auto* row = Packets<Atom>::row(call, p, call.rank, epoch);
  for (int o = 0; o < call.operands; ++o) {
    const Plan plan = run_of(call.operand[o], counts.send[p]);
    const View<Word, const char> box(stream_of(call.operand[o], counts, p), plan, plan.src_stride);
    const int words = box.count(plan);
    for (int i = stride.first; i < words; i += stride.step)
      Atom::put_packet(row + i, Atom::make_packet(box.template load<Atom>(i), epoch, call.tag));
    row += words;
  }
}

// Writes to its place what rank q sent in packets, or this rank's own stream.
template <class Atom, template <class, class> class View, class Block>
PURLIN_RANK void get_stream(Block& block, const Call<typename Atom::Packet>& call,
                            const Counts& counts, uint64_t epoch, int q) {
  using Word = typename Atom::Word;
  const Stride<Block> stride(block);
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
      const View<Word, const char> own(stream_of(operand, counts, q), plan, plan.src_stride);
      for (int i = stride.first; i < words; i += stride.step)
        to.store(i, own.template load<Atom>(i));
    }
    first += words;
  }
}

// Folds what all ranks sent in packets.
template <class Atom, template <class, class> class View, class Consumer, class Block>
PURLIN_RANK void fold_streams(Block& block, const Call<typename Atom::Packet>& call,
                              const Consumer& consumer, const Counts& counts, uint64_t epoch) {
  int first = 0;
  for (int o = 0; o < call.operands; ++o) {
    Operand operand = call.operand[o];
    operand.plan = run_of(operand, counts.receive[call.rank]);
    operand.src = stream_of(operand, counts, call.rank);
    consumer.template unpack<Packets<Atom>, View>(block, call, operand, epoch, first, false, {});
    first += View<typename Atom::Word, char>::count(operand.plan);
  }
}

}  // namespace purlin
