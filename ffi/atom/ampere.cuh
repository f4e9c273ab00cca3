// The Atom of sm_80 and later: asynchronous copies into a ring of slots that each thread has in
// shared memory.
#pragma once

#include "atom/generic.cuh"

namespace purlin {

struct AmpereAtom : GenericAtom {
  static constexpr const char* kName = "ampere";
  static constexpr int kLeast = 80;

  __host__ __device__ static constexpr int slots(int depth) {
    return depth < 1 || depth >= 8 ? 8 : depth >= 4 ? 4 : 2;
  }
  static constexpr int scratch_bytes(int depth) {
    return slots(depth) * kMaxThreads * static_cast<int>(sizeof(uint4));
  }

  template <class Block>
  __device__ static void copy(Block& block, const Moves& moves, const Plan& plan, Range range) {
    if (range.begin >= range.end) return;
    if (alignment(moves, plan, range) < kWidest)
      return GenericAtom::copy(block, moves, plan, range);
    copy_ring(Team(block), block.scratch(), slots(block.depth()), moves, plan, range);
  }

  template <class T, class Acc, class Op, class Block>
  __device__ static void reduce(Block& block, char* dst, const char* const* src, int world,
                                const Plan& plan, Range range) {
    uint64_t all = address(dst) | range.begin | range.end;
    for (int q = 0; q < world; ++q) all |= address(src[q]);
    if (range.begin >= range.end) return;
    if (alignment(all, plan) < kWidest)
      return GenericAtom::reduce<T, Acc, Op>(block, dst, src, world, plan, range);
    reduce_ring<T, Acc, Op>(Team(block), block.scratch(), slots(block.depth()), dst, src, world,
                            plan, range);
  }

 private:
  // A thread's walk through its vectors: all boxes at one place, then the next place.
  struct Walk {
    __device__ Walk(Team team, const Plan& plan, Range range, int boxes)
        : run(plan.contiguous()),
          boxes(boxes),
          step(team.threads * static_cast<int64_t>(sizeof(uint4))),
          end(range.end),
          at(range.begin + team.thread * static_cast<int64_t>(sizeof(uint4))),
          cursor(plan, at, step) {}

    __device__ bool done() const { return at >= end; }
    __device__ int64_t src() const { return run ? at : cursor.src(); }
    __device__ int64_t dst() const { return run ? at : cursor.dst(); }
    __device__ void next() {
      if (++box < boxes) return;
      box = 0;
      at += step;
      if (!run) cursor.next();
    }

    const bool run;
    const int boxes;
    const int64_t step, end;
    int64_t at;
    Cursor cursor;
    int box = 0;
  };

  // Calls use(walk, vector) for each vector in order, `kSlots` of them on their way. Threads share
  // nothing, so there is no barrier.
  template <int kSlots, class From, class Use>
  __device__ static void stream(Team team, char* scratch, Walk ahead, From from, Use use) {
    auto* slot = reinterpret_cast<uint4*>(scratch) + team.thread;
    const auto start = [&](int s) {
      if (!ahead.done()) {
        ptx::copy_async_16(slot + s * team.threads, from(ahead));
        ahead.next();
      }
      ptx::commit_async();  // also an empty group, which keeps the count
    };
    Walk walk = ahead;
    for (int s = 0; s < kSlots; ++s) start(s);
    for (int s = 0; !walk.done(); s = s + 1 < kSlots ? s + 1 : 0) {
      ptx::await_async<kSlots - 1>();
      const uint4 v = ptx::load_shared_16(slot + s * team.threads);
      start(s);
      use(walk, v);
      walk.next();
    }
  }
  template <class From, class Use>
  __device__ static void stream(int slots, Team team, char* scratch, Walk ahead, From from,
                                Use use) {
    if (slots == 8) return stream<8>(team, scratch, ahead, from, use);
    if (slots == 4) return stream<4>(team, scratch, ahead, from, use);
    stream<2>(team, scratch, ahead, from, use);
  }

  __device__ __noinline__ static void copy_ring(Team team, char* scratch, int slots,
                                                const Moves& moves, const Plan& plan, Range range) {
    stream(
        slots, team, scratch, Walk(team, plan, range, moves.count),
        [&](const Walk& w) { return moves.src[moves.rank(w.box)] + w.src(); },
        [&](const Walk& w, uint4 v) { ptx::store(moves.dst[moves.rank(w.box)] + w.dst(), v); });
  }

  template <class T, class Acc, class Op>
  __device__ __noinline__ static void reduce_ring(Team team, char* scratch, int slots, char* dst,
                                                  const char* const* src, int world,
                                                  const Plan& plan, Range range) {
    Folded<T, Acc, Op, uint4> folded;
    stream(
        slots, team, scratch, Walk(team, plan, range, world),
        [&](const Walk& w) { return src[w.box] + w.src(); },
        [&](const Walk& w, uint4 v) {
          folded.add(v, w.box == 0);
          if (w.box + 1 == world) ptx::store(dst + w.dst(), folded.result());
        });
  }
};

}  // namespace purlin
