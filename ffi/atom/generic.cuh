// The Atom of any GPU from sm_75: vector loads and stores, 16-byte packets, 128-byte lines.
#pragma once

#include <cstdint>
#include <cstring>

#include "atom/atom.h"
#include "atom/ptx.cuh"
#include "atom/tag.h"
#include "layout/cursor.h"
#include "layout/dtypes.h"

namespace purlin {

// How packets and lines are written and read on NVIDIA GPUs.
struct CudaFlags : CudaForms {
  __device__ static uint64_t flag(uint64_t epoch, uint64_t tag) {
    return purlin::flag_of(epoch, tag);
  }
  __device__ static Packet make_packet(Word word, uint64_t epoch, uint64_t tag) {
    return {word, flag(epoch, tag)};
  }
  __device__ static uint64_t flag_of(const Packet& packet) { return packet.high; }
  __device__ static Word payload(const Packet& packet) { return packet.low; }
  __device__ static void put_packet(Packet* at, const Packet& packet) {
    ptx::store_pair_relaxed_sys(at, packet);
  }
  __device__ static Packet get_packet(const Packet* at) { return ptx::load_pair_relaxed_sys(at); }

  // Lines are whole only if their threads run the access as one instruction. A barrier of a part of
  // a warp does not bring threads together that went different ways before; one of the whole does.
  __device__ static void put_line(Line* at, Pair piece, uint64_t flag, bool takes_part) {
    const int lane = threadIdx.x % kLineThreads;
    if (lane == kLineThreads - 1) piece.high = flag;
    __syncwarp();
    if (takes_part) ptx::store_piece_relaxed_sys(&at->piece[lane], piece);
  }
  __device__ static Pair get_line(const Line* at, uint64_t* flag, bool takes_part) {
    const int lane = threadIdx.x % kLineThreads;
    Pair piece = {0, 0};
    __syncwarp();
    if (takes_part) piece = ptx::load_piece_relaxed_sys(&at->piece[lane]);
    *flag = __shfl_sync(~0u, piece.high, kLineThreads - 1, kLineThreads);
    return piece;
  }
  __device__ static bool all_of_warp(bool found) { return __all_sync(~0u, found); }

  __device__ static Word load(const Word* at) { return ptx::load_word(at); }
};

// Folds one accumulator after another.
struct PlainMath {
  template <class Op, class Acc, int n>
  __device__ static void fold(Acc (&into)[n], const Acc (&next)[n]) {
#pragma unroll
    for (int k = 0; k < n; ++k) into[k] = Op::fold(into[k], next[k]);
  }
};

// What a thread works with in copy and reduce. The functions that do the work are called, so that
// they exist once for all kernels; they take values, so that nothing of the block need be in
// memory.
struct Team {
  int thread, threads;
  __device__ Team(int thread, int threads) : thread(thread), threads(threads) {}
  template <class Block>
  __device__ explicit Team(const Block& block) : Team(block.thread(), block.threads()) {}
};

// Loads and stores of up to sizeof(Widest) bytes.
template <class Widest, class Math>
struct LoadStore : CudaFlags {
  static constexpr int scratch_bytes(int /*depth*/) { return 0; }
  template <class Block>
  __device__ static void prepare(Block&) {}

  template <class Block>
  __device__ static void copy(Block& block, const Moves& moves, const Plan& plan, Range range) {
    copy_team(Team(block), moves, plan, range);
  }

  template <class T, class Acc, class Op, class Block>
  __device__ static void reduce(Block& block, char* dst, const char* const* src, int world,
                                const Plan& plan, Range range) {
    reduce_team<T, Acc, Op>(Team(block), dst, src, world, plan, range);
  }

 protected:
  static constexpr int kWidest = sizeof(Widest);

  // The widest access that fits all rows of all boxes.
  __device__ static int alignment(const Moves& moves, const Plan& plan, Range range) {
    uint64_t all = range.begin | range.end;
    for (int i = 0; i < moves.count; ++i) {
      const int p = moves.rank(i);
      all |= address(moves.dst[p]) | address(moves.src[p]);
    }
    return alignment(all, plan);
  }
  __device__ static int alignment(uint64_t all, const Plan& plan) {
    if (!plan.contiguous()) {
      all |= plan.run;
      for (int d = 0; d < kMaxOuter; ++d) all |= plan.src_stride[d] | plan.dst_stride[d];
    }
    all |= kWidest;
    return static_cast<int>(all & -all);
  }
  __device__ static uint64_t address(const char* at) { return reinterpret_cast<uint64_t>(at); }

  // Items of a vector of each rank, folded and rounded.
  template <class T, class Acc, class Op, class V>
  struct Folded {
    static constexpr int kItems = sizeof(V) / sizeof(T);
    Acc acc[kItems];

    __device__ void add(const V& v, bool first) {
      T items[kItems];
      memcpy(items, &v, sizeof items);
      Acc next[kItems];
#pragma unroll
      for (int k = 0; k < kItems; ++k) next[k] = widen(items[k]);
      if (!first) {
        Math::template fold<Op>(acc, next);
        return;
      }
#pragma unroll
      for (int k = 0; k < kItems; ++k) acc[k] = next[k];
    }
    __device__ V result() const {
      T items[kItems];
#pragma unroll
      for (int k = 0; k < kItems; ++k) items[k] = narrow<T>(acc[k]);
      V v;
      memcpy(&v, items, sizeof v);
      return v;
    }
  };

  // What most copies need is part of the kernel; the rest is called.
  __device__ static void copy_team(Team team, const Moves& moves, const Plan& plan, Range range) {
    if (plan.contiguous() && alignment(moves, plan, {range.begin, 0}) == kWidest) {
      const Range whole = {range.begin, range.end / kWidest * kWidest};
      copy_runs(team, moves, whole);
      range.begin = whole.end > range.begin ? whole.end : range.begin;
    }
    if (range.begin < range.end) copy_rest(team, moves, plan, range);
  }

  __device__ __noinline__ static void copy_rest(Team team, const Moves& moves, const Plan& plan,
                                                Range range) {
    switch (alignment(moves, plan, range)) {
      case 1: return copy_boxes<uint8_t>(team, moves, plan, range);
      case 2: return copy_boxes<uint16_t>(team, moves, plan, range);
      case 4:
      case 8: return copy_boxes<uint32_t>(team, moves, plan, range);
      default: return copy_boxes<uint4>(team, moves, plan, range);
    }
  }

  template <class T, class Acc, class Op>
  __device__ __noinline__ static void reduce_team(Team team, char* dst, const char* const* src,
                                                  int world, const Plan& plan, Range range) {
    if (range.begin >= range.end) return;
    uint64_t all = address(dst) | range.begin;
    for (int q = 0; q < world; ++q) all |= address(src[q]);
    if (plan.contiguous() && alignment(all, plan) == kWidest) {
      const Range whole = {range.begin, range.end / kWidest * kWidest};
      fold_runs<T, Acc, Op>(team, dst, src, world, whole);
      range.begin = whole.end;
    }
    if (alignment(all | range.begin | range.end, plan) == kWidest)
      fold_boxes<T, Acc, Op, Widest>(team, dst, src, world, plan, range);
    else
      fold_boxes<T, Acc, Op, T>(team, dst, src, world, plan, range);
  }

 private:
  // Vectors 0, 1, ... of a thread for which has(i), in all boxes: from from(i) to to(i). All loads
  // of a box start before its first store, so what is left at the end costs one round trip too.
  template <class V, int kFly, class Has, class From, class To>
  __device__ static void copy_batch(const Moves& moves, Has has, From from, To to) {
    for (int m = 0; m < moves.count; ++m) {
      const char* src = moves.src[moves.rank(m)];
      char* dst = moves.dst[moves.rank(m)];
      V v[kFly];
#pragma unroll
      for (int i = 0; i < kFly; ++i)
        if (has(i)) v[i] = ptx::load<V>(src + from(i));
#pragma unroll
      for (int i = 0; i < kFly; ++i)
        if (has(i)) ptx::store(dst + to(i), v[i]);
    }
  }

  __device__ static void copy_runs(Team team, const Moves& moves, Range range) {
    constexpr int kFly = 128 / sizeof(Widest);
    const int64_t step = team.threads * static_cast<int64_t>(sizeof(Widest));
    int64_t at = range.begin + team.thread * static_cast<int64_t>(sizeof(Widest));
    for (; at < range.end; at += kFly * step) {
      const auto place = [at, step](int i) { return at + i * step; };
      copy_batch<Widest, kFly>(
          moves, [at, step, end = range.end](int i) { return at + i * step < end; }, place, place);
    }
  }

  template <class V>
  __device__ static void copy_boxes(Team team, const Moves& moves, const Plan& plan, Range range) {
    constexpr int kFly = sizeof(V) >= 16 ? 4 : 1;  // the others are rare
    const int64_t step = team.threads * static_cast<int64_t>(sizeof(V));
    int64_t at = range.begin + team.thread * static_cast<int64_t>(sizeof(V));
    if (at >= range.end) return;
    Cursor cursor(plan, at, step);
    for (; at < range.end; at += kFly * step) {
      int64_t from[kFly], to[kFly];
#pragma unroll
      for (int i = 0; i < kFly; ++i, cursor.next()) from[i] = cursor.src(), to[i] = cursor.dst();
      copy_batch<V, kFly>(
          moves, [&](int i) { return at + i * step < range.end; }, [&](int i) { return from[i]; },
          [&](int i) { return to[i]; });
    }
  }

  // Several vectors of two ranks are in flight before the first is folded: near and far memory are
  // then busy at once.
  template <class T, class Acc, class Op>
  __device__ static void fold_runs(Team team, char* dst, const char* const* src, int world,
                                   Range range) {
    using V = Widest;
    constexpr int kFly = 64 / sizeof(V);
    const int64_t step = team.threads * static_cast<int64_t>(sizeof(V));
    int64_t at = range.begin + team.thread * static_cast<int64_t>(sizeof(V));
    for (; at < range.end; at += kFly * step) {
      Folded<T, Acc, Op, V> folded[kFly];
#pragma unroll 1
      for (int q = 0; q < world; q += 2) {
        const bool two = q + 1 < world;
        V v[2][kFly];
#pragma unroll
        for (int i = 0; i < kFly; ++i) {
          if (at + i * step >= range.end) break;
          v[0][i] = ptx::load<V>(src[q] + at + i * step);
          if (two) v[1][i] = ptx::load<V>(src[q + 1] + at + i * step);
        }
#pragma unroll
        for (int i = 0; i < kFly; ++i) {
          folded[i].add(v[0][i], q == 0);
          if (two) folded[i].add(v[1][i], false);
        }
      }
#pragma unroll
      for (int i = 0; i < kFly; ++i)
        if (at + i * step < range.end) ptx::store(dst + at + i * step, folded[i].result());
    }
  }

  // V holds one or more items.
  template <class T, class Acc, class Op, class V>
  __device__ static void fold_boxes(Team team, char* dst, const char* const* src, int world,
                                    const Plan& plan, Range range) {
    const int64_t step = team.threads * static_cast<int64_t>(sizeof(V));
    int64_t at = range.begin + team.thread * static_cast<int64_t>(sizeof(V));
    if (at >= range.end) return;
    Cursor cursor(plan, at, step);
#pragma unroll 1
    for (; at < range.end; at += step, cursor.next()) {
      Folded<T, Acc, Op, V> folded;
#pragma unroll 1
      for (int q = 0; q < world; ++q) folded.add(ptx::load<V>(src[q] + cursor.src()), q == 0);
      ptx::store(dst + cursor.dst(), folded.result());
    }
  }
};

struct GenericAtom : LoadStore<uint4, PlainMath> {
  static constexpr const char* kName = "generic";
  static constexpr int kLeast = 75;
};

}  // namespace purlin
