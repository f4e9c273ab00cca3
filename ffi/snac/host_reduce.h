// Reductions on the host, with the element type behind a pointer: SNAC is compiled once for all
// types.
#pragma once

#include <cstdint>
#include <string_view>

#include "atom/cpu.h"
#include "snac/consume.h"

namespace purlin {

struct HostFold {
  CpuAtom::Fold fold = nullptr;  // null where the reduction makes no sense for the type
  int64_t item_bytes = 0;
};

HostFold find_fold(std::string_view op, std::string_view dtype);

template <class Atom>
struct HostReduce {
  using Word = typename Atom::Word;
  static constexpr bool kReduces = true;

  CpuAtom::Fold fold = nullptr;
  int64_t item_bytes = 0;

  int words() const { return item_bytes > kWord ? static_cast<int>(item_bytes / kWord) : 1; }

  template <class Block, class Packet>
  void pull(Block& block, const Call<Packet>& call, const Operand& operand, const char* const* from,
            Range part) const {
    CpuAtom::reduce(block, fold, item_bytes, operand.dst, from, call.world, operand.plan, part);
  }

  template <class Form, template <class, class> class View, class Block, class Packet>
  void unpack(Block& block, const Call<Packet>& call, const Operand& operand, uint64_t epoch,
              int first_packet, bool, const typename Form::Unit&) const {
    const Plan& plan = operand.plan;
    const int together = words();
    const int units = (View<Word, char>::count(plan) + together - 1) / together;
    const View<Word, const char> own(operand.src + call.rank * plan.src_step, plan,
                                     plan.src_stride);
    const View<Word, char> to(operand.dst, plan, plan.dst_stride);
    const Stride<Block> stride(block);
    for (int u = stride.first; u < units; u += stride.step) {
      Word words[kMaxRanks][kMostWords], result[kMostWords];
      const char* from[kMaxRanks];
      for (int j = 0; j < together; ++j) {
        const int i = u * together + j;
        for_each_rank<Form, Atom>(
            block, call, epoch, first_packet + i, true, {own.template load<Atom>(i)},
            [&](int q, const typename Form::Unit& unit) { words[q][j] = unit.word[0]; });
      }
      for (int q = 0; q < call.world; ++q) from[q] = reinterpret_cast<const char*>(words[q]);
      fold(reinterpret_cast<char*>(result), from, call.world, 0, together * kWord / item_bytes);
      for (int j = 0; j < together; ++j) to.store(u * together + j, result[j]);
    }
  }

 private:
  static constexpr int64_t kWord = sizeof(Word);
  static constexpr int kMostWords = 16 / kWord;  // of complex128
};

// Calls f with the consumer of a row, a reduction and an element type; false if there is none.
template <class Atom, class F>
bool with_host_consumer(const Collective& row, std::string_view op, std::string_view dtype, F f) {
  if (row.consume == Consume::kCopy) return f(CopyConsumer<Atom>()), true;
  const HostFold found = find_fold(op, dtype);
  if (found.fold == nullptr) return false;
  HostReduce<Atom> reduce;
  reduce.fold = found.fold;
  reduce.item_bytes = found.item_bytes;
  return f(reduce), true;
}

}  // namespace purlin
