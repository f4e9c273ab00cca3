// The two ways to consume what peers sent: copy it to its place, or fold it in rank order.
//
// Each has the same three members, which the regimes are templates over:
//   words()       words that one thread takes together
//   pull(...)     reads bytes of the peers' operands where they lie: from[q] is rank q's block for
//                 this rank
//   unpack<View>(...)  reads the peers' packets from the own window, with boxes seen as View;
//                 `first` is this thread's first word of the own block, if it was loaded `ahead`
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "layout/collectives.h"
#include "layout/dtypes.h"
#include "snac/call.h"
#include "snac/words.h"

namespace purlin {

inline constexpr int kTogether = 4;  // accesses that a thread starts before it needs the first

// Calls use(q, word) for word i of each rank q, in ascending order; `own` is this rank's. Waits for
// several peers at once: a look costs a round trip, and a place in the code for its rare ends.
template <class Atom, class Block, class Packet, class Use>
PURLIN_RANK void for_each_rank(Block& block, const Call<Packet>& call, uint64_t epoch, int i,
                               typename Atom::Word own, Use use) {
  const uint64_t expected = Atom::flag(epoch, call.tag);
  const Packet* packets =
      call.window[call.rank].row(epoch, 0, call.world, call.packet_capacity) + i;
  PURLIN_ROLLED
  for (int first = 0; first < call.world; first += kTogether) {
    Packet packet[kTogether];
    for (;;) {
      int missing = -1;
      uint64_t seen = 0;
      PURLIN_UNROLLED
      for (int j = 0; j < kTogether; ++j) {
        const int q = first + j;
        if (q < call.world && q != call.rank)
          packet[j] = Atom::get_packet(packets + q * call.packet_capacity);
      }
      PURLIN_UNROLLED
      for (int j = 0; j < kTogether; ++j) {
        const int q = first + j;
        if (q >= call.world || q == call.rank || Atom::flag_of(packet[j]) == expected) continue;
        missing = q;
        seen = Atom::flag_of(packet[j]);
      }
      if (missing < 0) break;
      block.stalled({Phase::kPacket, missing}, expected, seen);
    }
    block.relax();
    PURLIN_UNROLLED
    for (int j = 0; j < kTogether; ++j) {
      const int q = first + j;
      if (q < call.world) use(q, q == call.rank ? own : Atom::payload(packet[j]));
    }
  }
}

// How the threads of the whole grid stride over words: a word that a thread sends is the word that
// it consumes, so a call may run in place where input and output have the same boxes.
template <class Block>
struct Stride {
  PURLIN_RANK explicit Stride(const Block& block)
      : first(block.index() * block.threads() + block.thread()),
        step(block.count() * block.threads()) {}
  int first;
  int step;
};

template <class Atom>
struct CopyConsumer {
  using Word = typename Atom::Word;

  PURLIN_HD static constexpr int words() { return 1; }

  template <class Block, class Packet>
  PURLIN_RANK void pull(Block& block, const Call<Packet>& call, const Operand& operand,
                        const char* const* from, Range part) const {
    const Plan& plan = operand.plan;
    for (int step = 1; step <= call.world; ++step) {  // the own block comes last
      const int q = call.peer(step);
      Atom::copy(block, operand.dst + q * plan.dst_step, from[q], plan, part);
    }
  }

  template <template <class, class> class View, class Block, class Packet>
  PURLIN_RANK void unpack(Block& block, const Call<Packet>& call, const Operand& operand,
                          uint64_t epoch, int first_packet, bool ahead, Word first) const {
    const Plan& plan = operand.plan;
    const int words = View<Word, char>::count(plan);
    const View<Word, const char> own(operand.src + call.rank * plan.src_step, plan,
                                     plan.src_stride);
    const Stride<Block> stride(block);
    for (int i = stride.first; i < words; i += stride.step) {
      const Word mine = ahead && i == stride.first ? first : own.template load<Atom>(i);
      for_each_rank<Atom>(block, call, epoch, first_packet + i, mine, [&](int q, Word word) {
        View<Word, char>(operand.dst + q * plan.dst_step, plan, plan.dst_stride).store(i, word);
      });
    }
  }
};

template <class Atom, class T, class Acc, class Op>
struct ReduceConsumer {
  using Word = typename Atom::Word;
  static constexpr int kItems = static_cast<int>(sizeof(Word) / sizeof(T));
  static_assert(kItems >= 1);

  PURLIN_HD static constexpr int words() { return 1; }

  template <class Block, class Packet>
  PURLIN_RANK void pull(Block& block, const Call<Packet>& call, const Operand& operand,
                        const char* const* from, Range part) const {
    Atom::template reduce<T, Acc, Op>(block, operand.dst, from, call.world, operand.plan, part);
  }

  template <template <class, class> class View, class Block, class Packet>
  PURLIN_RANK void unpack(Block& block, const Call<Packet>& call, const Operand& operand,
                          uint64_t epoch, int first_packet, bool ahead, Word first) const {
    const Plan& plan = operand.plan;
    const int words = View<Word, char>::count(plan);
    const View<Word, const char> own(operand.src + call.rank * plan.src_step, plan,
                                     plan.src_stride);
    const View<Word, char> to(operand.dst, plan, plan.dst_stride);
    const Stride<Block> stride(block);
    for (int i = stride.first; i < words; i += stride.step) {
      const Word mine = ahead && i == stride.first ? first : own.template load<Atom>(i);
      Acc acc[kItems] = {};
      for_each_rank<Atom>(block, call, epoch, first_packet + i, mine, [&](int q, Word word) {
        T items[kItems];
        memcpy(items, &word, sizeof items);
        for (int k = 0; k < kItems; ++k)
          acc[k] = q == 0 ? widen(items[k]) : Op::fold(acc[k], widen(items[k]));
      });
      T items[kItems];
      for (int k = 0; k < kItems; ++k) items[k] = narrow<T>(acc[k]);
      Word word;
      memcpy(&word, items, sizeof word);
      to.store(i, word);
    }
  }
};

// Calls f with the consumer of a reduction; false if it makes no sense for the type, or the Atom
// does not know it.
template <class Atom, class Type, class Op, class F>
bool with_reduction(F& f) {
  using Item = typename Type::Item;
  using Acc = typename Type::Accumulator;
  if constexpr (Op::template kFits<Acc> && Atom::template kReduces<Item, Op>) {
    f(ReduceConsumer<Atom, Item, Acc, Op>());
    return true;
  }
  return false;
}

// Calls f with the consumer of a row, a reduction and an element type; false if there is none.
template <class Atom, class F>
bool with_consumer(const Collective& row, std::string_view op, std::string_view dtype, F f) {
  if (row.consume == Consume::kCopy) return f(CopyConsumer<Atom>()), true;
  bool found = false;
  with_dtype(dtype, [&](auto type) {
    using Type = decltype(type);
    with_op(op, [&](auto fold) { found = with_reduction<Atom, Type, decltype(fold)>(f); });
  });
  return found;
}

}  // namespace purlin
