// The Atom of the host: memcpy, loops that the compiler vectorises, and 8-byte packets.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "atom/atom.h"
#include "layout/dtypes.h"

namespace purlin {

struct CpuAtom {
  using Word = uint32_t;
  using Packet = uint64_t;  // payload below, flag above

  static constexpr bool kLines = false;

  // Ranks that meet on the host have checked already that they run the same call: no tag.
  static uint64_t flag(uint64_t epoch, uint64_t /*tag*/) { return static_cast<uint32_t>(epoch); }
  static Packet make_packet(Word word, uint64_t epoch, uint64_t tag) {
    return flag(epoch, tag) << 32 | word;
  }
  static uint64_t flag_of(Packet packet) { return packet >> 32; }
  static Word payload(Packet packet) { return static_cast<Word>(packet); }

  // A packet also says that its sender has done with the staging of the call before. On a GPU the
  // end of a kernel stands between the two; between threads it takes an order, which x86 gives
  // away.
  static void put_packet(Packet* at, Packet packet) {
    __atomic_store_n(at, packet, __ATOMIC_RELEASE);
  }
  static Packet get_packet(const Packet* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }

  static Word load(const Word* at) { return *at; }

  template <class Block>
  static void copy(Block& block, const Moves& moves, const Plan& plan, Range range) {
    for (int i = 0; i < moves.count; ++i)
      copy(block, moves.dst[moves.rank(i)], moves.src[moves.rank(i)], plan, range);
  }

  template <class Block>
  static void copy(Block& block, char* dst, const char* src, const Plan& plan, Range range) {
    const Range mine = part_of(block, range);
    if (block.streams() && plan.run >= kLeastStreamed) {
      for_each_run(plan, mine, [&](int64_t to, int64_t from, int64_t bytes) {
        stream(dst + to, src + from, bytes);
      });
      store_fence();
      return;
    }
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
    fold_tiles<T, Acc, Op, 1>(dst, src, world, from, count);
  }

  // The same for the usual reductions. Four ranks in one pass: loads and stores of accumulators
  // cost as much as those of items. Wider vectors where the processor has them, with the same bits.
  template <class T, class Acc, class Op>
  static Fold fast_fold() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return &fold_avx2<T, Acc, Op>;
#endif
    return &fold_four<T, Acc, Op>;
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
  template <class T, class Acc, class Op>
  static void fold_four(char* dst, const char* const* src, int world, int64_t from, int64_t count) {
    fold_tiles<T, Acc, Op, 4>(dst, src, world, from, count);
  }
#if defined(__x86_64__)
  template <class T, class Acc, class Op>
  __attribute__((target("avx2"))) static void fold_avx2(char* dst, const char* const* src,
                                                        int world, int64_t from, int64_t count) {
    fold_tiles<T, Acc, Op, 4>(dst, src, world, from, count);
  }
#endif

  template <class T, class Acc, class Op, int together>
  [[gnu::always_inline]] static void fold_tiles(char* dst, const char* const* src, int world,
                                                int64_t from, int64_t count) {
    constexpr int64_t kTile = 1024;  // items: accumulators stay in the first-level cache
    Acc acc[kTile];
    for (int64_t done = 0; done < count; done += kTile) {
      const int64_t n = std::min(kTile, count - done);
      const int64_t at = from + done * static_cast<int64_t>(sizeof(T));
      int q = world >= together ? together : 1;
      if (q == together)
        fold_tile<T, Acc, Op, together, true>(acc, src, at, n);
      else
        fold_tile<T, Acc, Op, 1, true>(acc, src, at, n);
      if constexpr (together > 1)
        for (; q + together <= world; q += together)
          fold_tile<T, Acc, Op, together, false>(acc, src + q, at, n);
      for (; q < world; ++q) fold_tile<T, Acc, Op, 1, false>(acc, src + q, at, n);
      char* results = dst + done * static_cast<int64_t>(sizeof(T));
      for (int64_t i = 0; i < n; ++i) {
        const T item = narrow<T>(acc[i]);
        std::memcpy(results + i * sizeof(T), &item, sizeof(T));
      }
    }
  }

  // Folds `ranks` into the accumulators, which the first of them starts where there is nothing yet.
  template <class T, class Acc, class Op, int ranks, bool start>
  [[gnu::always_inline]] static void fold_tile(Acc* __restrict acc, const char* const* src,
                                               int64_t at, int64_t n) {
    const char* items[ranks];
    for (int k = 0; k < ranks; ++k) items[k] = src[k] + at;
    for (int64_t i = 0; i < n; ++i) {
      Acc value = widen(load<T>(items[0], i));
      if constexpr (!start) value = Op::fold(acc[i], value);
#pragma GCC unroll 3
      for (int k = 1; k < ranks; ++k) value = Op::fold(value, widen(load<T>(items[k], i)));
      acc[i] = value;
    }
  }

  static constexpr int64_t kLeastStreamed = 1024;  // bytes

  // A copy past the caches, for results that are larger than they are: a store to memory that is
  // not in the cache would first read it. Needs store_fence before anybody is told.
  static void stream(char* dst, const char* src, int64_t bytes) {
#if defined(__SSE2__)
    constexpr int64_t kLine = 64;
    const int64_t head = std::min<int64_t>(-reinterpret_cast<intptr_t>(dst) & (kLine - 1), bytes);
    std::memcpy(dst, src, head);
    dst += head, src += head, bytes -= head;
    for (; bytes >= kLine; dst += kLine, src += kLine, bytes -= kLine) {
      __m128i line[4];
      std::memcpy(line, src, kLine);
      for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(dst) + i, line[i]);
    }
#endif
    std::memcpy(dst, src, bytes);
  }
  static void store_fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
  }

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
