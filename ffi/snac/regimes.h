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
#include "snac/portion.h"
#include "snac/regime.h"
#include "snac/staged.h"

namespace purlin {

// The words that one thread sends, each to all peers, in batches of which all loads start before
// the first store needs one.
template <class Atom, template <class, class> class View, class Block>
class Sends {
 public:
  using Word = typename Atom::Word;
  using Packet = typename Atom::Packet;

  // Words i .. i + together - 1 of a thread are neighbours.
  PURLIN_RANK Sends(const Call<Packet>& call, const Stride<Block>& stride, int together)
      : call_(call), stride_(stride), together_(together), i_(stride.first * together) {
    settle();
  }

  PURLIN_RANK bool done() const { return operand_ == call_.operands || call_.world == 1; }

  PURLIN_RANK void load(Word (&words)[kTogether]) const {
    const Operand& operand = call_.operand[operand_];
    PURLIN_UNROLLED
    for (int j = 0; j < kTogether; ++j) {
      if (step_ + j >= call_.world) break;
      const char* box = operand.src + call_.peer(step_ + j) * operand.plan.src_step;
      words[j] = View<Word, const char>(box, operand.plan, operand.plan.src_stride)
                     .template load<Atom>(i_);
    }
  }

  PURLIN_RANK void put(const Word (&words)[kTogether], uint64_t epoch) const {
    PURLIN_UNROLLED
    for (int j = 0; j < kTogether; ++j) {
      if (step_ + j >= call_.world) break;
      Packet* row = Packets<Atom>::row(call_, call_.peer(step_ + j), call_.rank, epoch);
      Atom::put_packet(row + first_ + i_, Atom::make_packet(words[j], epoch, call_.tag));
    }
  }

  PURLIN_RANK void next() {
    step_ += kTogether;
    if (step_ < call_.world) return;
    step_ = 1;
    i_ += 1;
    if (i_ % together_ == 0) i_ += (stride_.step - 1) * together_;
    settle();
  }

 private:
  // On to the next operand where this one has no more words for the thread.
  PURLIN_RANK void settle() {
    while (operand_ < call_.operands) {
      const int words = View<Word, char>::count(call_.operand[operand_].plan);
      if (i_ < words) return;
      first_ += words;
      ++operand_;
      i_ = stride_.first * together_;
    }
  }

  const Call<Packet>& call_;
  const Stride<Block>& stride_;
  const int together_;
  int operand_ = 0, i_, step_ = 1;
  int first_ = 0;  // packet of the operand's first word
};

// Small: data and flag travel in one store, into the peers' windows. One one-way hop. All that need
// not follow the data is done before the wait for the peers', and the first loads run beside the
// read of the epoch.
template <class Atom, template <class, class> class View, class Consumer, class Block>
PURLIN_RANK void packet(Block& block, const Call<typename Atom::Packet>& call,
                        const Consumer& consumer = Consumer()) {
  using Word = typename Atom::Word;
  const Stride<Block> stride(block);
  Sends<Atom, View, Block> sends(call, stride, consumer.words());
  Word words[kTogether], own = 0;
  if (!sends.done()) sends.load(words);
  const Operand& head = call.operand[0];
  const bool ahead = stride.first < View<Word, char>::count(head.plan);
  if (ahead)
    own = View<Word, const char>(head.src + call.rank * head.plan.src_step, head.plan,
                                 head.plan.src_stride)
              .template load<Atom>(stride.first);
  const uint64_t epoch = enter(block, call);
  while (!sends.done()) {
    sends.put(words, epoch);
    sends.next();
    if (!sends.done()) sends.load(words);
  }
  block.sync();
  leave(block, call, epoch);

  int first = 0;
  for (int o = 0; o < call.operands; ++o) {
    consumer.template unpack<Packets<Atom>, View>(block, call, call.operand[o], epoch, first,
                                                  ahead && o == 0, {own});
    first += View<Word, char>::count(call.operand[o].plan);
  }
}

// Small, but more than a few packets: the same in lines of fifteen words.
template <class Atom, template <class, class> class View, class Consumer, class Block>
PURLIN_RANK void line(Block& block, const Call<typename Atom::Packet>& call,
                      const Consumer& consumer = Consumer()) {
  using Word = typename Atom::Word;
  using Form = Lines<Atom>;
  const Stride<Block> stride(block);
  const uint64_t epoch = enter(block, call);
  int first = 0;
  for (int o = 0; o < call.operands; ++o) {
    const Operand& operand = call.operand[o];
    const int words = View<Word, char>::count(operand.plan), units = Form::units(words);
    for (int u = stride.first; Form::goes_on(u, units); u += kTogether * stride.step)
      for (int step = 1; step < call.world; ++step) {
        const int p = call.peer(step);
        const View<Word, const char> box(operand.src + p * operand.plan.src_step, operand.plan,
                                         operand.plan.src_stride);
        auto* places = Form::row(call, p, call.rank, epoch) + first;
        typename Form::Unit what[kTogether];
        PURLIN_UNROLLED
        for (int j = 0; j < kTogether; ++j) what[j] = Form::load(box, u + j * stride.step, words);
        PURLIN_UNROLLED
        for (int j = 0; j < kTogether; ++j) {
          const int unit = u + j * stride.step;
          if (Form::goes_on(unit, units))
            Form::put(places + Form::place(unit), what[j], Atom::flag(epoch, call.tag),
                      unit < units);
        }
      }
    first += Form::places(words);
  }
  block.sync();
  leave(block, call, epoch);

  first = 0;
  for (int o = 0; o < call.operands; ++o) {
    consumer.template unpack<Form, View>(block, call, call.operand[o], epoch, first, false, {});
    first += Form::places(View<Word, char>::count(call.operand[o].plan));
  }
}

// Large, where peers see each other's arrays: the notify words carry the addresses of the inputs,
// peers read straight from them, and the exit rendezvous keeps them alive until all have read.
template <class Atom, class Consumer, class Block>
PURLIN_RANK void zero_staging(Block& block, const Call<typename Atom::Packet>& call,
                              const Consumer& consumer = Consumer()) {
  const Portion own(block, call.operands, whole_boxes(call));
  const uint64_t epoch = enter(block, call);
  auto& from = block.shared().from;
  const auto input = [&](int o, int p) { return call.src_for(p, o, call.operand[o].src); };
  const auto place = [&](int o, int p, uint64_t address) {
    from[o][p] = reinterpret_cast<const char*>(address) + call.rank * call.operand[o].plan.src_step;
  };
  if (block.thread() == 0)
    for (int o = 0; o < call.operands; ++o) place(o, call.rank, input(o, call.rank));
  exchange(block, call, epoch, call.operands, input, place);
  block.sync();
  leave(block, call, epoch);
  own.for_each(
      [&](int o, Range part) { consumer.pull(block, call, call.operand[o], from[o], part); });
  part(block, call, epoch);
}

// The same the other way round, for copies: the words carry the addresses of the results, and each
// rank writes what it has for a peer straight to its place.
template <class Atom, class Block>
PURLIN_RANK void zero_staging_push(Block& block, const Call<typename Atom::Packet>& call) {
  const Portion own(block, call.operands, whole_boxes(call));
  const uint64_t epoch = enter(block, call);
  auto& to = block.shared().to;
  const auto result = [&](int o, int p) { return call.dst_for(p, o); };
  const auto place = [&](int o, int p, uint64_t address) {
    to[o][p] = reinterpret_cast<char*>(address) + call.rank * call.operand[o].plan.dst_step;
  };
  if (block.thread() == 0)
    for (int o = 0; o < call.operands; ++o) place(o, call.rank, result(o, call.rank));
  exchange(block, call, epoch, call.operands, result, place);
  block.sync();
  leave(block, call, epoch);
  own.for_each([&](int o, Range part) {
    const Plan& plan = call.operand[o].plan;
    const Moves moves = {{to[o], nullptr, 0},
                         {nullptr, call.operand[o].src, plan.src_step},
                         call.peer(1),
                         call.world,
                         call.world};
    Atom::copy(block, moves, plan, part);
  });
  part(block, call, epoch);
}

// all_reduce as a reduce_scatter (head) and an all_gather (tail) between the ranks' own arrays:
// rank p reduces piece p into its result, and all read it from there.
template <class Atom, class Consumer, class Block>
PURLIN_RANK void zero_staging_composed(Block& block, const Call<typename Atom::Packet>& call,
                                       const Consumer& consumer = Consumer()) {
  const uint64_t epoch = enter(block, call);
  auto& from = block.shared().from;
  auto& results = block.shared().results;
  const auto mine = [&](int w, int p) {
    const int o = w / 2;
    return w % 2 == 0 ? call.src_for(p, o, call.operand[o].src) : call.dst_for(p, o);
  };
  const auto place = [&](int w, int p, uint64_t address) {
    (w % 2 == 0 ? from : results)[w / 2][p] = reinterpret_cast<const char*>(address);
  };
  if (block.thread() == 0)
    for (int w = 0; w < 2 * call.operands; ++w) place(w, call.rank, mine(w, call.rank));
  exchange(block, call, epoch, 2 * call.operands, mine, place);
  block.sync();
  // Piece p of each operand is rank p's to reduce.
  const auto piece = [&](int p) {
    return [&call, p](int o) {
      return share(call.operand[o].plan.bytes(), kShareUnit, call.world, p);
    };
  };
  Portion(block, call.operands, piece(call.rank)).for_each([&](int o, Range part) {
    consumer.pull(block, call, call.operand[o], from[o], part);
  });
  await_peers(block, call, epoch + 1);
  leave(block, call, epoch + 1);
  for (int step = 1; step < call.world; ++step) {
    const int p = call.peer(step);
    Portion(block, call.operands, piece(p)).for_each([&](int o, Range part) {
      Atom::copy(block, one_move(call.operand[o].dst, results[o][p]), call.operand[o].plan, part);
    });
  }
  part(block, call, epoch + 1);
}

// Any of the regimes above, chosen as it runs: for hosts and tests, since it holds the code of all.
template <class Atom, class Consumer, class Block>
PURLIN_RANK void run_waiting(Block& block, Regime regime, bool flat,
                             const Call<typename Atom::Packet>& call, const Consumer& consumer) {
  switch (regime) {
    case Regime::kMeet: break;
    case Regime::kPacket:
      if (flat) return packet<Atom, FlatWords>(block, call, consumer);
      return packet<Atom, Words>(block, call, consumer);
    case Regime::kLine:
      if constexpr (Atom::kLines) {
        if (flat) return line<Atom, FlatWords>(block, call, consumer);
        return line<Atom, Words>(block, call, consumer);
      }
      break;
    case Regime::kStaged: return staged<Atom>(block, call, consumer);
    case Regime::kZeroStaging: return zero_staging<Atom>(block, call, consumer);
    case Regime::kZeroStagingPush: return zero_staging_push<Atom>(block, call);
    case Regime::kComposed: return composed<Atom>(block, call, consumer);
    case Regime::kZeroStagingComposed: return zero_staging_composed<Atom>(block, call, consumer);
  }
}

// On a host where all ranks have met already: the meeting was the notify, and no array is given
// back before all are done, so nothing waits. `from` holds, for each operand, the ranks' blocks.
template <class Consumer, class Block, class Packet>
PURLIN_RANK void meet(Block& block, const Call<Packet>& call, const Consumer& consumer,
                      const char* const (*from)[kMaxRanks]) {
  Portion(block, call.operands, whole_boxes(call)).for_each([&](int o, Range part) {
    consumer.pull(block, call, call.operand[o], from[o], part);
  });
}

// The same where all ranks get the same result (packed to packed): rank 0's part is made once, and
// copied to the others while it is in the cache.
template <class Atom, class Consumer, class Block, class Packet>
PURLIN_RANK void meet_once(Block& block, const Call<Packet>& first, const Consumer& consumer,
                           const char* const (*from)[kMaxRanks],
                           char* const (*results)[kMaxRanks]) {
  Portion(block, first.operands, whole_boxes(first)).for_each([&](int o, Range part) {
    const Plan& plan = first.operand[o].plan;
    consumer.pull(block, first, first.operand[o], from[o], part);
    for (int r = 1; r < first.world; ++r)
      Atom::copy(block, one_move(results[o][r], first.operand[o].dst), plan, part);
  });
}

}  // namespace purlin
