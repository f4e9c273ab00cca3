// What a block tells the blocks of its number on other ranks: where its arrays lie, how far it is.
#pragma once

#include <cstdint>

#include "atom/tag.h"
#include "snac/call.h"

namespace purlin {

// Tells every peer `words` words, mine(w, peer). Orders nothing: for that, release comes before.
template <class Block, class Packet, class Mine>
PURLIN_RANK void tell(Block& block, const Call<Packet>& call, uint64_t epoch, int words,
                      Mine mine) {
  const uint64_t flag = flag_of(epoch, call.tag);
  const int c = block.index(), half = static_cast<int>(epoch & 1);
  for (int p = block.thread(); p < call.world; p += block.threads()) {
    if (p == call.rank) continue;
    for (int w = 0; w < words; ++w)
      block.announce(&call.window[p].control().ready[half][c][call.rank][w], mine(w, p), flag);
  }
}

// Learns what the peers have told, learn(w, peer, word); a barrier must follow.
template <class Block, class Packet, class Learn>
PURLIN_RANK void hear(Block& block, const Call<Packet>& call, uint64_t epoch, int words,
                      Learn learn) {
  const uint64_t flag = flag_of(epoch, call.tag);
  const int c = block.index(), half = static_cast<int>(epoch & 1);
  for (int p = block.thread(); p < call.world; p += block.threads()) {
    if (p == call.rank) continue;
    for (int w = 0; w < words; ++w)
      learn(w, p, block.receive(&call.control().ready[half][c][p][w], flag, {Phase::kEnter, p}));
  }
}

// Both. What a block did before its last barrier is seen by whoever learns; a barrier must follow.
template <class Block, class Packet, class Mine, class Learn>
PURLIN_RANK void exchange(Block& block, const Call<Packet>& call, uint64_t epoch, int words,
                          Mine mine, Learn learn) {
  if (block.thread() >= call.world) return;
  block.release();
  tell(block, call, epoch, words, mine);
  hear(block, call, epoch, words, learn);
}

// Waits until the peers have come as far as `epoch`; then what they wrote before is seen.
template <class Block, class Packet>
PURLIN_RANK void await_peers(Block& block, const Call<Packet>& call, uint64_t epoch) {
  block.sync();
  exchange(block, call, epoch, 1, [](int, int) { return uint64_t{0}; }, [](int, int, uint64_t) {});
  block.sync();
}

// The exit rendezvous: no rank goes on while a peer may still read or write its arrays. This rank
// has used those of the peers for which used(p), and those for which lent(p) have used its own.
template <class Block, class Packet, class Used, class Lent>
PURLIN_RANK void part(Block& block, const Call<Packet>& call, uint64_t epoch, Used used,
                      Lent lent) {
  const int c = block.index();
  block.sync();
  for (int p = block.thread(); p < call.world; p += block.threads())
    if (p != call.rank && used(p))
      block.signal(&call.window[p].control().done[c][call.rank], epoch);
  for (int p = block.thread(); p < call.world; p += block.threads())
    if (p != call.rank && lent(p))
      block.await(&call.control().done[c][p], epoch, {Phase::kLeave, p});
}
template <class Block, class Packet>
PURLIN_RANK void part(Block& block, const Call<Packet>& call, uint64_t epoch) {
  part(block, call, epoch, [](int) { return true; }, [](int) { return true; });
}

}  // namespace purlin
