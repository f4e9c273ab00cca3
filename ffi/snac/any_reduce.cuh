// Reductions on GPUs whose operator and type are known as the kernel runs: one set of kernels for
// all of them. The usual sums have kernels of their own.
#pragma once

#include <cstdint>
#include <string_view>

#include "layout/folds.h"
#include "snac/consume.h"

namespace purlin {

// Calls use(T(), Acc(), Op()) for the reduction of this number.
template <class Type, class Op, class Use>
__device__ bool use_if(int fold, Use use) {
  if constexpr (Op::template kFits<typename Type::Accumulator> && detail::kIsCarrier<Type, Op>)
    if (fold == kFold<Type, Op>) {
      use(typename Type::Item(), typename Type::Accumulator(), Op());
      return true;
    }
  return false;
}
template <class Op, class Use>
__device__ bool use_types(int fold, Use use) {
#define PURLIN_ROW(name, item, accumulator) use_if<Dtype<item, accumulator>, Op>(fold, use) ||
  return PURLIN_REDUCE_DTYPES(PURLIN_ROW) false;
#undef PURLIN_ROW
}
// One jump, since the first that fits ends the search.
template <class Use>
__device__ bool with_fold(int fold, Use use) {
#define PURLIN_ROW(name, functor) use_types<functor>(fold, use) ||
  return PURLIN_REDUCE_OPS(PURLIN_ROW) false;
#undef PURLIN_ROW
}

// The values of one place, of every rank: as many items as fit, zeros behind them.
inline constexpr int kSlotBytes = 16;
struct alignas(kSlotBytes) Slots {
  uint64_t of[kMaxRanks][2];
};

// Folds the slots of `world` ranks into the first of them. Rolled, since there are many of these.
template <class T, class Acc, class Op>
__device__ __noinline__ void fold_slots(Slots& slots, int world) {
  constexpr int kItems = kSlotBytes / static_cast<int>(sizeof(T));
  const auto item = [&](int q, int k) { return reinterpret_cast<T*>(slots.of[q]) + k; };
#pragma unroll 1
  for (int k = 0; k < kItems; ++k) {
    Acc acc = widen(*item(0, k));
#pragma unroll 1
    for (int q = 1; q < world; ++q) acc = Op::fold(acc, widen(*item(q, k)));
    *item(0, k) = narrow<T>(acc);
  }
}

// The items of `bytes` at `at`, which is aligned to them.
__device__ inline void load_slot(uint64_t (&slot)[2], const char* at, int bytes) {
  slot[0] = slot[1] = 0;
  switch (bytes) {
    case 16: slot[1] = ptx::load<uint64_t>(at + 8); [[fallthrough]];
    case 8: slot[0] = ptx::load<uint64_t>(at); break;
    case 4: slot[0] = ptx::load<uint32_t>(at); break;
    case 2: slot[0] = ptx::load<uint16_t>(at); break;
    default: slot[0] = ptx::load<uint8_t>(at);
  }
}
__device__ inline void store_slot(char* at, const uint64_t (&slot)[2], int bytes) {
  switch (bytes) {
    case 16: ptx::store(at + 8, slot[1]); [[fallthrough]];
    case 8: ptx::store(at, slot[0]); break;
    case 4: ptx::store(at, static_cast<uint32_t>(slot[0])); break;
    case 2: ptx::store(at, static_cast<uint16_t>(slot[0])); break;
    default: ptx::store(at, static_cast<uint8_t>(slot[0]));
  }
}

// The widest of 16 bytes and one item that fits all rows of all boxes.
__device__ inline int slot_bytes(const Call<Pair>& call, const Plan& plan, const char* dst,
                                 const char* const* from, Range part) {
  uint64_t all = reinterpret_cast<uint64_t>(dst) | part.begin | part.end;
  for (int q = 0; q < call.world; ++q) all |= reinterpret_cast<uint64_t>(from[q]);
  if (!plan.contiguous()) {
    all |= plan.run;
    for (int d = 0; d < kMaxOuter; ++d) all |= plan.src_stride[d] | plan.dst_stride[d];
  }
  if (all % 16 == 0) return 16;
  return all % 8 == 0 || call.item_bytes <= 8 ? call.item_bytes : 8;
}

// Items of two ranks in one word.
template <class T, class Acc, class Op>
__device__ __noinline__ uint64_t fold_words(uint64_t one, uint64_t other) {
  constexpr int kItems = static_cast<int>(sizeof one / sizeof(T));
  T into[kItems], next[kItems];
  memcpy(into, &one, sizeof one);
  memcpy(next, &other, sizeof other);
#pragma unroll
  for (int k = 0; k < kItems; ++k) into[k] = narrow<T>(Op::fold(widen(into[k]), widen(next[k])));
  memcpy(&one, into, sizeof one);
  return one;
}

template <class Atom>
struct AnyReduce {
  static constexpr bool kReduces = true;

  PURLIN_HD static constexpr int words() { return 1; }

  template <class Block>
  __device__ void pull(Block& block, const Call<Pair>& call, const Operand& operand,
                       const char* const* from, Range part) const {
    bool done = false;
    with_fold(call.fold, [&](auto item, auto acc, auto op) {
      using T = decltype(item);
      using Acc = decltype(acc);
      using Op = decltype(op);
      if constexpr (kRounds<T, Acc> && sizeof(T) == 2 && std::is_same_v<Op, Sum>) {
        Atom::template reduce<T, Acc, Op>(block, operand.dst, from, call.world, operand.plan, part);
        done = true;
      }
    });
    if (!done) pull_team(block.thread(), block.threads(), call, operand, from, part);
  }

  template <class Form, template <class, class> class View, class Block>
  __device__ void unpack(Block& block, const Call<Pair>& call, const Operand& operand,
                         uint64_t epoch, int first_place, bool ahead,
                         const typename Form::Unit& first) const {
    using Unit = typename Form::Unit;
    const View<uint64_t, char> to(operand.dst, operand.plan, operand.plan.dst_stride);
    for_each_unit<Form, View>(
        block, call, operand, ahead, first, [&](int u, int words, const Unit& own) {
          Slots slots = {};
          for_each_rank<Form, Atom>(
              block, call, epoch, first_place + Form::place(u), u < Form::units(words), own,
              [&](int q, const Unit& unit) { memcpy(slots.of[q], &unit, sizeof unit); });
          fold(call.fold, slots, call.world);
          Unit result;
          memcpy(&result, slots.of[0], sizeof result);
          Form::store(to, u, words, result);
        });
  }

 private:
  static constexpr int kFly = 4;  // vectors of a rank that are loaded together

  template <class T, class Acc>
  static constexpr bool kRounds = !std::is_same_v<T, Acc>;  // at the end alone

  // Whether ranks may be folded one after another in their own type: nothing is rounded between.
  __device__ static bool folds_in_pairs(int fold, int world) {
    bool found = false;
    with_fold(fold, [&](auto item, auto acc, auto op) {
      using Op = decltype(op);
      constexpr bool kPicks = std::is_same_v<Op, Max> || std::is_same_v<Op, Min>;
      constexpr bool kExact = kPicks || !kRounds<decltype(item), decltype(acc)>;
      found = sizeof item <= 8 && (kExact || world <= 2);
    });
    return found;
  }

  __device__ __noinline__ static void fold(int fold, Slots& slots, int world) {
    with_fold(fold, [&](auto item, auto acc, auto op) {
      fold_slots<decltype(item), decltype(acc), decltype(op)>(slots, world);
    });
  }

  __device__ __noinline__ static void pull_team(int thread, int threads, const Call<Pair>& call,
                                                const Operand& operand, const char* const* from,
                                                Range part) {
    const Plan& plan = operand.plan;
    if (plan.contiguous() && folds_in_pairs(call.fold, call.world)) {
      const Range whole = {part.begin, part.end / 16 * 16};
      if (whole.begin < whole.end && slot_bytes(call, plan, operand.dst, from, whole) == 16) {
        pull_runs(thread, threads, call, operand.dst, from, whole);
        part.begin = whole.end;
      }
    }
    pull_slots(thread, threads, call, operand, from, part);
  }

  __device__ static void pull_slots(int thread, int threads, const Call<Pair>& call,
                                    const Operand& operand, const char* const* from, Range part) {
    const Plan& plan = operand.plan;
    const int bytes = slot_bytes(call, plan, operand.dst, from, part);
    int64_t at = part.begin + thread * bytes;
    if (at >= part.end) return;
    Cursor cursor(plan, at, threads * bytes);
    const bool run = plan.contiguous();
    for (; at < part.end; at += threads * bytes, cursor.next()) {
      Slots slots;
      for (int q = 0; q < call.world; ++q)
        load_slot(slots.of[q], from[q] + (run ? at : cursor.src()), bytes);
      fold(call.fold, slots, call.world);
      store_slot(operand.dst + (run ? at : cursor.dst()), slots.of[0], bytes);
    }
  }

  // Vectors of the next rank are under way while those of the last are folded.
  __device__ static void pull_runs(int thread, int threads, const Call<Pair>& call, char* dst,
                                   const char* const* from, Range part) {
    const int64_t step = threads * int64_t{16};
    for (int64_t at = part.begin + thread * int64_t{16}; at < part.end; at += kFly * step) {
      const auto load = [&](Pair(&v)[kFly], const char* src) {
#pragma unroll
        for (int i = 0; i < kFly; ++i)
          if (at + i * step < part.end) v[i] = ptx::load<Pair>(src + at + i * step);
      };
      Pair into[kFly] = {}, next[kFly] = {};
      load(into, from[0]);
      if (call.world > 1) load(next, from[1]);
#pragma unroll 1
      for (int q = 1; q < call.world; ++q) {
        with_fold(call.fold, [&](auto item, auto acc, auto op) {
          if constexpr (sizeof item <= 8) {
            const auto fold = fold_words<decltype(item), decltype(acc), decltype(op)>;
#pragma unroll
            for (int i = 0; i < kFly; ++i)
              into[i] = {fold(into[i].low, next[i].low), fold(into[i].high, next[i].high)};
          }
        });
        if (q + 1 < call.world) load(next, from[q + 1]);
      }
#pragma unroll
      for (int i = 0; i < kFly; ++i)
        if (at + i * step < part.end) ptx::store(dst + at + i * step, into[i]);
    }
  }
};

}  // namespace purlin
