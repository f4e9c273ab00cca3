// What a rank owns for one partition of the devices into groups: its epoch, flags and packets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/host_device.h"

namespace purlin {

inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxBlocks = 64;
inline constexpr int kMaxOperands = 4;

// "I have entered the call of this flag, and an operand of mine lies here." Written by a peer's
// block.
struct alignas(16) Notify {
  uint64_t address;
  uint64_t flag;
};

// Zeroed once, before any peer may see it; never unmapped while the domain lives. The epoch of a
// block only grows, and is written by that block alone, when it leaves a call. All ranks of a group
// run the same calls on a window, so their epochs agree whenever they meet.
struct alignas(64) Control {
  uint64_t epoch[kMaxBlocks];
  uint64_t poison;   // a peer has given up: nothing that waits here may end well
  uint64_t claimed;  // which kinds of report the own device has written
  Notify ready[kMaxBlocks][kMaxRanks][kMaxOperands];  // [own block][peer that entered]
  uint64_t done[kMaxBlocks][kMaxRanks];               // [own block][peer that has read them]
};

// A window as peers see it. Packets lie in two halves by the parity of the epoch, in each half one
// row of `capacity` packets for each source rank.
template <class Packet>
struct Window {
  Control* control = nullptr;
  Packet* packets = nullptr;

  static constexpr size_t packet_bytes(int world, int64_t capacity) {
    return 2 * sizeof(Packet) * static_cast<size_t>(world) * static_cast<size_t>(capacity);
  }
  PURLIN_HD Packet* row(uint64_t epoch, int source, int world, int64_t capacity) const {
    return packets + (static_cast<int64_t>(epoch & 1) * world + source) * capacity;
  }
};

}  // namespace purlin
