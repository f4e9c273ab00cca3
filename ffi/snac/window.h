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
  // [parity of the epoch][own block][peer that entered]: a peer may be one epoch ahead.
  Notify ready[2][kMaxBlocks][kMaxRanks][kMaxOperands];
  uint64_t done[kMaxBlocks][kMaxRanks];  // [own block][peer that has read or written the arrays]
};

// A window as peers see it: control words, packets, staging. Packets lie in two halves by the
// parity of the epoch, in each half one row of `capacity` packets for each source rank; so does
// staging, in halves of which each block has a part.
template <class Packet>
struct Window {
  char* base = nullptr;

  static constexpr int64_t kControlBytes = (sizeof(Control) + 4095) / 4096 * 4096;

  PURLIN_HD static constexpr int64_t packet_bytes(int world, int64_t capacity) {
    return 2 * static_cast<int64_t>(sizeof(Packet)) * world * capacity;
  }
  static constexpr int64_t bytes(int world, int64_t capacity, int64_t staging_half) {
    return kControlBytes + packet_bytes(world, capacity) + 2 * staging_half;
  }

  PURLIN_HD Control& control() const { return *reinterpret_cast<Control*>(base); }
  PURLIN_HD Packet* row(uint64_t epoch, int source, int world, int capacity) const {
    return reinterpret_cast<Packet*>(base + kControlBytes) +
           (static_cast<int>(epoch & 1) * world + source) * capacity;
  }
};

}  // namespace purlin
