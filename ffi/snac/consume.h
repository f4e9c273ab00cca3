// The two ways to consume what peers sent: copy it to its place, or fold it in rank order.
//
// Each has the same members, which the regimes are templates over:
//   kReduces      which of the two it is
//   words()       words that one thread takes together, of packets
//   pull(...)     reads bytes of the peers' operands where they lie: from[q] is rank q's block for
//                 this rank
//   unpack<Form, View>(...)  reads what came in a form of forms.h into the own window, with boxes
//                 seen as View; `first` is this thread's first unit of the own block, if it was
//                 loaded `ahead`
#pragma once

#include <cstdint>
#include <cstring>

#include "layout/collectives.h"
#include "layout/dtypes.h"
#include "snac/call.h"
#include "snac/forms.h"
#include "snac/words.h"

namespace purlin {

inline constexpr int kTogether = 4;  // accesses that a thread starts before it needs the first

// Calls use(q, unit) for a unit of each rank q, in ascending order; `own` is this rank's. Waits for
// several peers at once: a look costs a round trip, and a place in the code for its rare ends. A
// thread that takes no part only keeps its warp together.
template <class Form, class Atom, class Block, class Packet, class Use>
PURLIN_RANK void for_each_rank(Block& block, const Call<Packet>& call, uint64_t epoch, int place,
                               bool takes_part, const typename Form::Unit& own, Use use) {
  const uint64_t expected = Atom::flag(epoch, call.tag);
  const auto* parcels = Form::row(call, call.rank, 0, epoch) + place;
  PURLIN_ROLLED
  for (int first = 0; first < call.world; first += kTogether) {
    typename Form::Parcel parcel[kTogether] = {};
    for (;;) {
      int missing = -1;
      uint64_t seen = 0;
      PURLIN_UNROLLED
      for (int j = 0; j < kTogether; ++j) {
        const int q = first + j;
        if (q < call.world && q != call.rank)
          parcel[j] = Form::get(parcels + q * Form::row_length(call), takes_part);
      }
      PURLIN_UNROLLED
      for (int j = 0; j < kTogether; ++j) {
        const int q = first + j;
        if (q >= call.world || q == call.rank || Form::flag_of(parcel[j]) == expected) continue;
        missing = q;
        seen = Form::flag_of(parcel[j]);
      }
      if (!takes_part) missing = -1;
      if (Form::all(missing < 0)) break;
      if (missing >= 0) block.stalled({Phase::kPacket, missing}, expected, seen);
    }
    block.relax();
    PURLIN_UNROLLED
    for (int j = 0; j < kTogether; ++j) {
      const int q = first + j;
      if (q < call.world && takes_part) use(q, q == call.rank ? own : Form::payload(parcel[j]));
    }
  }
}

// How the threads of the whole grid stride over units: a unit that a thread sends is the one that
// it consumes, so a call may run in place where input and output have the same boxes.
template <class Block>
struct Stride {
  PURLIN_RANK explicit Stride(const Block& block)
      : first(block.index() * block.threads() + block.thread()),
        step(block.count() * block.threads()) {}
  int first;
  int step;
};

// The own block of an operand, and this thread's units of it.
template <class Form, template <class, class> class View, class Block, class Packet, class Use>
PURLIN_RANK void for_each_unit(const Block& block, const Call<Packet>& call, const Operand& operand,
                               bool ahead, const typename Form::Unit& first, Use use) {
  using Word = typename Form::Word;
  const Plan& plan = operand.plan;
  const int words = View<Word, char>::count(plan);
  const View<Word, const char> own(operand.src + call.rank * plan.src_step, plan, plan.src_stride);
  const Stride<Block> stride(block);
  for (int u = stride.first; Form::goes_on(u, Form::units(words)); u += stride.step)
    use(u, words, ahead && u == stride.first ? first : Form::load(own, u, words));
}

template <class Atom>
struct CopyConsumer {
  static constexpr bool kReduces = false;

  PURLIN_HD static constexpr int words() { return 1; }

  template <class Block, class Packet>
  PURLIN_RANK void pull(Block& block, const Call<Packet>& call, const Operand& operand,
                        const char* const* from, Range part) const {
    const Plan& plan = operand.plan;
    const Moves moves = {{nullptr, operand.dst, plan.dst_step},
                         {from, nullptr, 0},
                         call.peer(1),
                         call.world,
                         call.world};
    Atom::copy(block, moves, plan, part);
  }

  template <class Form, template <class, class> class View, class Block, class Packet>
  PURLIN_RANK void unpack(Block& block, const Call<Packet>& call, const Operand& operand,
                          uint64_t epoch, int first_place, bool ahead,
                          const typename Form::Unit& first) const {
    const Plan& plan = operand.plan;
    for_each_unit<Form, View>(
        block, call, operand, ahead, first, [&](int u, int words, const typename Form::Unit& own) {
          for_each_rank<Form, Atom>(block, call, epoch, first_place + Form::place(u),
                                    u < Form::units(words), own,
                                    [&](int q, const typename Form::Unit& unit) {
                                      const View<typename Form::Word, char> to(
                                          operand.dst + q * plan.dst_step, plan, plan.dst_stride);
                                      Form::store(to, u, words, unit);
                                    });
        });
  }
};

template <class Atom, class T, class Acc, class Op>
struct ReduceConsumer {
  static constexpr bool kReduces = true;

  PURLIN_HD static constexpr int words() { return 1; }

  template <class Block, class Packet>
  PURLIN_RANK void pull(Block& block, const Call<Packet>& call, const Operand& operand,
                        const char* const* from, Range part) const {
    Atom::template reduce<T, Acc, Op>(block, operand.dst, from, call.world, operand.plan, part);
  }

  template <class Form, template <class, class> class View, class Block, class Packet>
  PURLIN_RANK void unpack(Block& block, const Call<Packet>& call, const Operand& operand,
                          uint64_t epoch, int first_place, bool ahead,
                          const typename Form::Unit& first) const {
    using Unit = typename Form::Unit;
    constexpr int kItems = static_cast<int>(sizeof(Unit) / sizeof(T));
    static_assert(kItems >= 1);
    const View<typename Form::Word, char> to(operand.dst, operand.plan, operand.plan.dst_stride);
    for_each_unit<Form, View>(
        block, call, operand, ahead, first, [&](int u, int words, const Unit& own) {
          Acc acc[kItems] = {};
          for_each_rank<Form, Atom>(block, call, epoch, first_place + Form::place(u),
                                    u < Form::units(words), own, [&](int q, const Unit& unit) {
                                      T items[kItems];
                                      memcpy(items, &unit, sizeof items);
                                      for (int k = 0; k < kItems; ++k)
                                        acc[k] = q == 0 ? widen(items[k])
                                                        : Op::fold(acc[k], widen(items[k]));
                                    });
          T items[kItems];
          for (int k = 0; k < kItems; ++k) items[k] = narrow<T>(acc[k]);
          Unit result;
          memcpy(&result, items, sizeof result);
          Form::store(to, u, words, result);
        });
  }
};

}  // namespace purlin
