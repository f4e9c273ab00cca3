// The Atom of any GPU from sm_75: vector loads and stores, 16-byte packets.
#pragma once

#include <cstdint>
#include <type_traits>

#include "atom/atom.h"
#include "atom/ptx.cuh"
#include "layout/dtypes.h"
#include "snac/tag.h"

namespace purlin {

struct GenericAtom {
  using Word = uint64_t;
  using Packet = Pair;  // payload below, flag above

  static constexpr const char* kName = "generic";

  // So far: sums of float32 and bfloat16.
  template <class Item, class Op>
  static constexpr bool kReduces =
      std::is_same_v<Op, Sum> && (std::is_same_v<Item, float> || std::is_same_v<Item, Bfloat16>);
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

  __device__ static Word load(const Word* at) { return ptx::load_word(at); }

  template <class Block>
  __device__ static void copy(Block& block, char* dst, const char* src, const Plan& plan,
                              Range range) {
    switch (common_alignment(plan, range, dst, src)) {
      case 16: return copy_as<uint4>(block, dst, src, plan, range);
      case 8: return copy_as<uint2>(block, dst, src, plan, range);
      case 4: return copy_as<uint32_t>(block, dst, src, plan, range);
      case 2: return copy_as<uint16_t>(block, dst, src, plan, range);
      default: return copy_as<uint8_t>(block, dst, src, plan, range);
    }
  }

  template <class T, class Acc, class Op, class Block>
  __device__ static void reduce(Block& block, char* dst, const char* const* src, int world,
                                const Plan& plan, Range range) {
    uint64_t all = 0;
    for (int q = 0; q < world; ++q) all |= reinterpret_cast<uint64_t>(src[q]);
    if (common_alignment(plan, range, dst, reinterpret_cast<const char*>(all)) == 16)
      fold<T, Acc, Op, uint4>(block, dst, src, world, plan, range);
    else
      fold<T, Acc, Op, T>(block, dst, src, world, plan, range);
  }

 private:
  static constexpr int kUnroll = 8;

  // The widest access, up to 16 bytes, that fits all rows on both sides.
  __device__ static int common_alignment(const Plan& plan, Range range, const char* dst,
                                         const char* src) {
    uint64_t all =
        reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | range.begin | range.end;
    if (!plan.contiguous()) {
      all |= plan.run;
      for (int d = 0; d < kMaxOuter; ++d) all |= plan.src_stride[d] | plan.dst_stride[d];
    }
    all |= 16;
    return static_cast<int>(all & -all);
  }

  template <class V, class Block>
  __device__ static void copy_as(Block& block, char* dst, const char* src, const Plan& plan,
                                 Range range) {
    constexpr int64_t kBytes = sizeof(V);
    const int64_t step = block.threads() * kBytes;
    int64_t at = range.begin + block.thread() * kBytes;
    for (; at + (kUnroll - 1) * step < range.end; at += kUnroll * step) {
      V v[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i)
        v[i] = *reinterpret_cast<const V*>(src + plan.offset(plan.src_stride, at + i * step));
#pragma unroll
      for (int i = 0; i < kUnroll; ++i)
        *reinterpret_cast<V*>(dst + plan.offset(plan.dst_stride, at + i * step)) = v[i];
    }
    for (; at < range.end; at += step)
      *reinterpret_cast<V*>(dst + plan.offset(plan.dst_stride, at)) =
          *reinterpret_cast<const V*>(src + plan.offset(plan.src_stride, at));
  }

  // V holds one or more items. Several V of all ranks are in flight before the first is folded.
  template <class T, class Acc, class Op, class V, class Block>
  __device__ static void fold(Block& block, char* dst, const char* const* src, int world,
                              const Plan& plan, Range range) {
    constexpr int64_t kBytes = sizeof(V);
    constexpr int kItems = sizeof(V) / sizeof(T);
    constexpr int kFly = 4;
    const int64_t step = block.threads() * kBytes;
    for (int64_t at = range.begin + block.thread() * kBytes; at < range.end; at += kFly * step) {
      Acc acc[kFly][kItems];
      for (int q = 0; q < world; ++q) {
        V v[kFly];
#pragma unroll
        for (int i = 0; i < kFly; ++i)
          if (at + i * step < range.end)
            v[i] =
                *reinterpret_cast<const V*>(src[q] + plan.offset(plan.src_stride, at + i * step));
#pragma unroll
        for (int i = 0; i < kFly; ++i) {
          T items[kItems];
          memcpy(items, &v[i], sizeof items);
#pragma unroll
          for (int k = 0; k < kItems; ++k) {
            const Acc next = widen(items[k]);
            acc[i][k] = q == 0 ? next : Op::fold(acc[i][k], next);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kFly; ++i) {
        if (at + i * step >= range.end) break;
        T items[kItems];
#pragma unroll
        for (int k = 0; k < kItems; ++k) items[k] = narrow<T>(acc[i][k]);
        V v;
        memcpy(&v, items, sizeof v);
        *reinterpret_cast<V*>(dst + plan.offset(plan.dst_stride, at + i * step)) = v;
      }
    }
  }
};

}  // namespace purlin
