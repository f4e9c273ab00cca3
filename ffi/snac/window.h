// What a rank owns for one partition of the devices into groups: its epoch, flags and packets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atom/pair.h"
#include "layout/host_device.h"

namespace purlin {

inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxBlocks = 64;
inline constexpr int kMaxOperands = 4;
inline constexpr int kMaxNotices = 2 * kMaxOperands;  // of a block to another in one epoch

// "I have entered the call of this flag, and an array of mine lies here." Written by a peer's
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
  uint64_t poison;  // a peer has given up: nothing that waits here may end well
  uint64_t failed;  // whether the own device has written why
  uint64_t slow;    // epoch of the last call that the own device has reported as slow
  // [parity of the epoch][own block][peer that entered]: a peer may be one epoch ahead.
  Notify ready[2][kMaxBlocks][kMaxRanks][kMaxNotices];
  uint64_t done[kMaxBlocks][kMaxRanks];  // [own block][peer that has read or written the arrays]
};

// How much of each form of transport a window holds.
struct Capacity {
  int32_t packets = 0;       // from one source in one half
  int32_t lines = 0;         // the same
  int64_t staging_half = 0;  // bytes
};

// A window as peers see it: control words, packets, lines, staging, none of which is ever written
// as another. Packets lie in two halves by the parity of the epoch, in each half one row for each
// source rank; so do lines; and staging in halves of which each block has a part.
template <class Packet>
struct Window {
  char* base = nullptr;

  static constexpr int64_t kControlBytes = (sizeof(Control) + 4095) / 4096 * 4096;

  PURLIN_HD static constexpr int64_t staging_at(int world, const Capacity& capacity) {
    return lines_at(world, capacity) +
           2 * static_cast<int64_t>(sizeof(Line)) * world * capacity.lines;
  }
  static constexpr int64_t bytes(int world, const Capacity& capacity) {
    return staging_at(world, capacity) + 2 * capacity.staging_half;
  }

  PURLIN_HD Control& control() const { return *reinterpret_cast<Control*>(base); }
  PURLIN_HD Packet* packets(uint64_t epoch, int source, int world, const Capacity& of) const {
    return reinterpret_cast<Packet*>(base + kControlBytes) +
           (static_cast<int>(epoch & 1) * world + source) * of.packets;
  }
  PURLIN_HD Line* lines(uint64_t epoch, int source, int world, const Capacity& of) const {
    return reinterpret_cast<Line*>(base + lines_at(world, of)) +
           (static_cast<int>(epoch & 1) * world + source) * of.lines;
  }
  PURLIN_HD char* staging(uint64_t epoch, int world, const Capacity& of) const {
    return base + staging_at(world, of) + static_cast<int64_t>(epoch & 1) * of.staging_half;
  }

 private:
  PURLIN_HD static constexpr int64_t lines_at(int world, const Capacity& capacity) {
    const int64_t bytes = 2 * static_cast<int64_t>(sizeof(Packet)) * world * capacity.packets;
    return kControlBytes + (bytes + kLineAlign - 1) / kLineAlign * kLineAlign;
  }
  static constexpr int64_t kLineAlign = sizeof(Line);
};

}  // namespace purlin
