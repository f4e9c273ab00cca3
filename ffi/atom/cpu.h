// The Atom of the host: memcpy, loops that the compiler vectorises, and 8-byte packets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "atom/atom.h"
#include "layout/dtypes.h"

namespace purlin {

struct CpuAtom {
  using Word = uint32_t;
  using Packet = uint64_t;  // payload below, flag above

  template <class Item, class Op>
  static constexpr bool kReduces = true;

  // Ranks that meet on the host have checked already that they run the same call: no tag.
  static uint64_t flag(uint64_t epoch, uint64_t /*tag*/) { return static_cast<uint32_t>(epoch); }
  static Packet make_packet(Word word, uint64_t epoch, uint64_t tag) {
    return flag(epoch, tag) << 32 | word;
  }
  static uint64_t flag_of(Packet packet) { return packet >> 32; }
  static Word payload(Packet packet) { return static_cast<Word>(packet); }

  // A packet also says that its sender has done with the staging of the call before. On a GPU the
  // end of a kernel stands between the two; between threads it takes an order, which x86 gives away.
  static void put_packet(Packet* at, Packet packet) {
    __atomic_store_n(at, packet, __ATOMIC_RELEASE);
  }
  static Packet get_packet(const Packet* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }

  template <class Block>
  static void copy(Block& block, char* dst, const char* src, const Plan& plan, Range range) {
    const Range mine = part_of(block, range);
    for_each_run(plan, mine, [&](int64_t to, int64_t from, int64_t bytes) {
      // Short runs of whole elements: a constant size turns the call into one load and one store.
      switch (bytes) {
        case 4: std::memcpy(dst + to, src + from, 4); break;
        case 8: std::memcpy(dst + to, src + from, 8); break;
        case 16: std::memcpy(dst + to, src + from, 16); break;
        default: std::memcpy(dst + to, src + from, bytes);
      }
    });
  }

  // One contiguous run: `count` items at src[q] + from, folded in ascending order of q.
  using Fold = void (*)(char* dst, const char* const* src, int world, int64_t from, int64_t count);

  template <class T, class Acc, class Op>
  static void fold(char* dst, const char* const* src, int world, int64_t from, int64_t count) {
    constexpr int64_t kTile = 1024;  // items: accumulators stay in the first-level cache
    Acc acc[kTile];
    for (int64_t done = 0; done < count; done += kTile) {
      const int64_t n = std::min(kTile, count - done);
      for (int q = 0; q < world; ++q) {
        const char* items = src[q] + from + done * sizeof(T);
        if (q == 0) {
          for (int64_t i = 0; i < n; ++i) acc[i] = widen(load<T>(items, i));
        } else {
          for (int64_t i = 0; i < n; ++i) acc[i] = Op::fold(acc[i], widen(load<T>(items, i)));
        }
      }
      char* results = dst + done * sizeof(T);
      for (int64_t i = 0; i < n; ++i) {
        const T item = narrow<T>(acc[i]);
        std::memcpy(results + i * sizeof(T), &item, sizeof(T));
      }
    }
  }

  // As the contract's reduce, with the types behind `fold`.
  template <class Block>
  static void reduce(Block& block, Fold fold, int64_t item_bytes, char* dst, const char* const* src,
                     int world, const Plan& plan, Range range) {
    for_each_run(plan, part_of(block, range), [&](int64_t to, int64_t from, int64_t bytes) {
      fold(dst + to, src, world, from, bytes / item_bytes);
    });
  }

 private:
  // Items may lie at any address.
  template <class T>
  static T load(const char* items, int64_t i) {
    T item;
    std::memcpy(&item, items + i * sizeof(T), sizeof(T));
    return item;
  }

  static constexpr int64_t kUnit = 64;  // threads of a block share a range in whole cache lines

  template <class Block>
  static Range part_of(const Block& block, Range range) {
    const Range part = share(range.end - range.begin, kUnit, block.threads(), block.thread());
    return {range.begin + part.begin, range.begin + part.end};
  }

  // Calls f(dst offset, src offset, bytes) for each contiguous piece of [begin, end).
  template <class F>
  static void for_each_run(const Plan& plan, Range range, F f) {
    if (range.begin >= range.end) return;
    int64_t row = range.begin / plan.run;
    int64_t skip = range.begin % plan.run;
    for (int64_t at = range.begin; at < range.end; ++row, skip = 0) {
      const int64_t bytes = std::min(plan.run - skip, range.end - at);
      f(plan.row_offset(plan.dst_stride, row) + skip, plan.row_offset(plan.src_stride, row) + skip,
        bytes);
      at += bytes;
    }
  }
};

}  // namespace purlin
