// The regimes of collectives whose counts are data: rows of the leading axis, as many for each peer
// as it says. Counts travel with the notify, so no rank need know another's, and no host knows any.
//
// Every block moves a share of every stream (what one rank sends to another), so that blocks have
// equal work however uneven the streams are; and each starts at another peer, so that near and far
// memory, and all links, are busy at once.
#pragma once

#include <cstdint>

#include "snac/counted_staged.h"
#include "snac/epoch.h"
#include "snac/regime.h"
#include "snac/streams.h"

namespace purlin {

template <class Atom, template <class, class> class View, class Consumer, class Block>
PURLIN_RANK void packet_counted(Block& block, const Call<typename Atom::Packet>& call,
                                const Consumer& consumer = Consumer()) {
  const Counted& of = call.counted;
  Counts& counts = block.shared().counts;
  const uint64_t epoch = enter(block, call);
  count_sends(block, call);
  tell(block, call, epoch, kCountWords, [&](int w, int p) { return count_word(of, counts, w, p); });
  for (int step = 1; step < call.world; ++step)
    put_stream<Atom, View>(block, call, counts, epoch, call.peer(step));
  hear(block, call, epoch, kCountWords,
       [&](int w, int q, uint64_t word) { learn_count(of, counts, w, q, word); });
  block.sync();
  count_receives(block, call);
  leave(block, call, epoch);
  if constexpr (Consumer::kReduces)
    fold_streams<Atom, View>(block, call, consumer, counts, epoch);
  else
    for (int step = 1; step <= call.world; ++step)
      get_stream<Atom, View>(block, call, counts, epoch, call.peer(step));
  fill(block, call, counts);
}

// Whether a stream of so many rows travels in packets where others are read in place. Both of its
// ends know.
template <class Packet>
PURLIN_HD bool is_short(const Call<Packet>& call, int64_t rows) {
  int64_t bytes = 0;
  for (int o = 0; o < call.operands; ++o) bytes += rows * call.operand[o].row_bytes;
  return bytes <= call.packet_bytes;
}

// Each stream as its length wants: short ones in packets, that come with their counts; long ones
// are read where they lie, and only between their ends there is an exit rendezvous.
template <class Atom, class Consumer, class Block>
PURLIN_RANK void zero_staging_counted(Block& block, const Call<typename Atom::Packet>& call,
                                      const Consumer& consumer = Consumer()) {
  const Counted& of = call.counted;
  Counts& counts = block.shared().counts;
  auto& from = block.shared().from;
  const uint64_t epoch = enter(block, call);
  count_sends(block, call);
  bool lends = false;  // whether a peer reads here
  for (int step = 1; step < call.world; ++step)
    lends = lends || !is_short(call, counts.send[call.peer(step)]);
  if (block.thread() == 0)
    for (int o = 0; o < call.operands; ++o)
      from[o][call.rank] = stream_of(call.operand[o], counts, call.rank);
  const int words = kCountWords + call.operands;
  if (lends && block.thread() < call.world) block.release();
  tell(block, call, epoch, words, [&](int w, int p) {
    if (w < kCountWords) return count_word(of, counts, w, p);
    const int o = w - kCountWords;
    return call.src_for(p, o, stream_of(call.operand[o], counts, p));
  });
  for (int step = 1; step < call.world; ++step)
    if (const int p = call.peer(step); is_short(call, counts.send[p]))
      put_stream<Atom, Words>(block, call, counts, epoch, p);
  hear(block, call, epoch, words, [&](int w, int q, uint64_t word) {
    if (w < kCountWords)
      learn_count(of, counts, w, q, word);
    else
      from[w - kCountWords][q] = reinterpret_cast<const char*>(word);
  });
  block.sync();
  count_receives(block, call);
  leave(block, call, epoch);
  if constexpr (Consumer::kReduces) {
    if (is_short(call, counts.receive[call.rank]))
      fold_streams<Atom, Words>(block, call, consumer, counts, epoch);
    else
      pull_streams<Atom>(block, call, consumer, counts, from, [](int) { return true; });
  } else {
    for (int step = 1; step < call.world; ++step)
      if (const int q = call.peer(step); is_short(call, counts.receive[q]))
        get_stream<Atom, Words>(block, call, counts, epoch, q);
    pull_streams<Atom>(block, call, consumer, counts, from,
                       [&](int q) { return q == call.rank || !is_short(call, counts.receive[q]); });
  }
  fill(block, call, counts);
  part(
      block, call, epoch, [&](int q) { return !is_short(call, counts.receive[q]); },
      [&](int p) { return !is_short(call, counts.send[p]); });
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
