// The two ways to consume what peers sent: copy it to its place, or fold it in rank order.
//
// Each has the same three members, which the regimes are templates over:
//   words()       words that one thread takes together
//   pull(...)     reads bytes of the peers' operands where they lie: from[q] is rank q's block for
//                 this rank
//   unpack(...)   reads the peers' packets from the own window
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "layout/collectives.h"
#include "layout/dtypes.h"
#include "snac/call.h"
#include "snac/words.h"

namespace purlin {

// Spins until packet `at` of call `epoch` is there.
template <class Atom, class Block>
PURLIN_RANK typename Atom::Word await_packet(Block& block, const typename Atom::Packet* at,
                                             uint64_t epoch, uint64_t tag, int peer) {
  const uint64_t expected = Atom::flag(epoch, tag);
  typename Atom::Packet packet = Atom::get_packet(at);
  while (Atom::flag_of(packet) != expected) {
    block.stalled({Phase::kPacket, peer}, expected, Atom::flag_of(packet));
    packet = Atom::get_packet(at);
  }
  block.relax();
  return Atom::payload(packet);
}

// How the threads of the whole grid stride over words: a word that a thread sends is the word that
// it consumes, so a call may run in place where input and output have the same boxes.
template <class Block>
struct Stride {
  PURLIN_RANK explicit Stride(const Block& block)
      : first(static_cast<int64_t>(block.index()) * block.threads() + block.thread()),
        step(static_cast<int64_t>(block.count()) * block.threads()) {}
  int64_t first;
  int64_t step;
};

template <class Atom>
struct CopyConsumer {
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

  template <class Block, class Packet>
  PURLIN_RANK void unpack(Block& block, const Call<Packet>& call, const Operand& operand,
                          uint64_t epoch, int64_t first_packet) const {
    using Word = typename Atom::Word;
    const Plan& plan = operand.plan;
    const int64_t words = Words<Word, char>::count(plan);
    const Stride<Block> stride(block);
    for (int step = 0; step < call.world; ++step) {
      const int q = call.peer(step);
      const Words<Word, char> to(operand.dst + q * plan.dst_step, plan, plan.dst_stride);
      if (q == call.rank) {
        const Words<Word, const char> own(operand.src + q * plan.src_step, plan, plan.src_stride);
        for (int64_t i = stride.first; i < words; i += stride.step) to.store(i, own.load(i));
        continue;
      }
      const Packet* row =
          call.window[call.rank].row(epoch, q, call.world, call.packet_capacity) + first_packet;
      for (int64_t i = stride.first; i < words; i += stride.step)
        to.store(i, await_packet<Atom>(block, row + i, epoch, call.tag, q));
    }
  }
};

template <class Atom, class T, class Acc, class Op>
struct ReduceConsumer {
  using Word = typename Atom::Word;
  static constexpr int kWords = sizeof(T) > sizeof(Word)
                                    ? static_cast<int>(sizeof(T) / sizeof(Word))
                                    : 1;
  static constexpr int kItems = static_cast<int>(kWords * sizeof(Word) / sizeof(T));

  PURLIN_HD static constexpr int words() { return kWords; }

  template <class Block, class Packet>
  PURLIN_RANK void pull(Block& block, const Call<Packet>& call, const Operand& operand,
                        const char* const* from, Range part) const {
    Atom::template reduce<T, Acc, Op>(block, operand.dst, from, call.world, operand.plan, part);
  }

  template <class Block, class Packet>
  PURLIN_RANK void unpack(Block& block, const Call<Packet>& call, const Operand& operand,
                          uint64_t epoch, int64_t first_packet) const {
    const Plan& plan = operand.plan;
    const int64_t units = (Words<Word, char>::count(plan) + kWords - 1) / kWords;
    const Words<Word, const char> own(operand.src + call.rank * plan.src_step, plan,
                                      plan.src_stride);
    const Words<Word, char> to(operand.dst, plan, plan.dst_stride);
    const Stride<Block> stride(block);
    for (int64_t u = stride.first; u < units; u += stride.step) {
      Word mine[kWords];  // loaded before any wait
      for (int j = 0; j < kWords; ++j) mine[j] = own.load(u * kWords + j);
      Acc acc[kItems] = {};
      for (int q = 0; q < call.world; ++q) {
        Word words[kWords];
        const Packet* row =
            call.window[call.rank].row(epoch, q, call.world, call.packet_capacity) + first_packet;
        for (int j = 0; j < kWords; ++j) {
          const int64_t i = u * kWords + j;
          words[j] =
              q == call.rank ? mine[j] : await_packet<Atom>(block, row + i, epoch, call.tag, q);
        }
        T items[kItems];
        memcpy(items, words, sizeof items);
        for (int k = 0; k < kItems; ++k)
          acc[k] = q == 0 ? widen(items[k]) : Op::fold(acc[k], widen(items[k]));
      }
      T items[kItems];
      for (int k = 0; k < kItems; ++k) items[k] = narrow<T>(acc[k]);
      Word words[kWords];
      memcpy(words, items, sizeof items);
      for (int j = 0; j < kWords; ++j) to.store(u * kWords + j, words[j]);
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
