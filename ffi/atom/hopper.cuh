// The Atom of sm_90 and later: bulk copies through a ring of stages in shared memory.
#pragma once

#include "atom/generic.cuh"

namespace purlin {

// Bulk copies where boxes are long, aligned runs; what else there is goes to Base. Rows shorter
// than that measured no faster than loads and stores.
template <class Base>
struct Bulk : Base {
  // One thread starts all copies, at about a microsecond each: stages are large.
  static constexpr int kStage = 32768;
  static constexpr int kMaxDepth = 4;
  static constexpr int kTiles = 4;  // of each rank, in reductions

  static constexpr int scratch_bytes(int depth) {
    return static_cast<int>(sizeof(Ring)) + clamp(depth) * kStage;
  }

  template <class Block>
  __device__ static void prepare(Block& block) {
    Ring& ring = ring_of(block.scratch());
    if (block.thread() == 0) {
      for (uint64_t& full : ring.full) ptx::init_barrier(&full, 1);
      ring.phases = 0;
      ptx::fence_proxy_async_shared();
    }
    block.sync();
  }

  template <class Block>
  __device__ static void copy(Block& block, const Moves& moves, const Plan& plan, Range range) {
    copy_any(Team(block), block.scratch(), clamp(block.depth()), moves, plan, range);
  }

  template <class T, class Acc, class Op, class Block>
  __device__ static void reduce(Block& block, char* dst, const char* const* src, int world,
                                const Plan& plan, Range range) {
    reduce_any<T, Acc, Op>(Team(block), block.scratch(), clamp(block.depth()), dst, src, world,
                           plan, range);
  }

 private:
  static constexpr int kWarp = 32;
  static constexpr int64_t kLeastRun = 8192;

  struct alignas(128) Ring {
    uint64_t full[kTiles > kMaxDepth ? kTiles : kMaxDepth];
    uint32_t phases;  // bit s: the parity with which stage s is waited for next
  };
  // The side of the ring that loads, and the side that waits for what was loaded.
  struct Place {
    int stage = 0;
    __device__ void next(int stages) { stage = stage + 1 < stages ? stage + 1 : 0; }
  };
  __device__ static void await(Ring& ring, uint32_t& phases, int stage) {
    ptx::await_barrier(&ring.full[stage], phases >> stage & 1);
    phases ^= 1u << stage;
  }

  __host__ __device__ static constexpr int clamp(int depth) {
    return depth < 1 || depth > kMaxDepth ? kMaxDepth : depth;
  }
  __device__ static Ring& ring_of(char* scratch) { return *reinterpret_cast<Ring*>(scratch); }
  __device__ static char* stages_of(char* scratch) { return scratch + sizeof(Ring); }

  // What bulk copies take of a range; nothing where runs are short or not aligned.
  __device__ static Range bulk_part(const Plan& plan, Range range, int alignment) {
    const bool takes = alignment % 16 == 0 && range.begin % 16 == 0 &&
                       (plan.contiguous() || plan.run >= kLeastRun);
    const int64_t end = range.end / 16 * 16;
    return {range.begin, takes && end > range.begin ? end : range.begin};
  }

  // One thread's walk through the pieces of a copy: each place in all boxes, then the next place.
  struct Walk {
    __device__ Walk(const Plan& plan, Range range, int boxes)
        : plan(plan), range(range), boxes(boxes), at(range.begin) {
      settle();
    }
    __device__ bool done() const { return at >= range.end; }
    __device__ void next() {
      if (++box < boxes) return;
      box = 0;
      at += bytes;
      settle();
    }
    __device__ void settle() {
      if (done()) return;
      const int64_t in_run = plan.contiguous() ? range.end - at : plan.run - at % plan.run;
      const int64_t left = in_run < range.end - at ? in_run : range.end - at;
      bytes = static_cast<uint32_t>(left < kStage ? left : kStage);
      src = dst = at;
      if (plan.contiguous()) return;
      src = Plan::wide_offset(plan, plan.src_stride, at);
      dst = Plan::wide_offset(plan, plan.dst_stride, at);
    }

    const Plan& plan;
    const Range range;
    const int boxes;
    int64_t at, src = 0, dst = 0;
    uint32_t bytes = 0;
    int box = 0;
  };

  __device__ __noinline__ static void copy_any(Team team, char* scratch, int depth,
                                               const Moves& moves, const Plan& plan, Range range) {
    const Range bulk = bulk_part(plan, range, Base::alignment(moves, plan, {0, 0}));
    if (bulk.begin < bulk.end) {
      // One thread starts the copies from or to peers; the other warps do the rank's own.
      const bool split = moves.count > 1 && team.threads > kWarp;
      const int far = split ? moves.count - 1 : moves.count;
      if (team.thread == 0)
        copy_bulk(scratch, depth, moves.part(0, far), plan, bulk);
      else if (split && team.thread >= kWarp)
        Base::copy_team({team.thread - kWarp, team.threads - kWarp}, moves.part(far, moves.count),
                        plan, bulk);
    }
    Base::copy_team(team, moves, plan, {bulk.end, range.end});
  }

  // By one thread. Some stores still read from their stages while the other stages load.
  __device__ static void copy_bulk(char* scratch, int depth, const Moves& moves, const Plan& plan,
                                   Range range) {
    Ring& ring = ring_of(scratch);
    char* stages = stages_of(scratch);
    Walk ahead(plan, range, moves.count), walk = ahead;
    uint32_t phases = ring.phases;
    Place load, store;
    const auto start = [&] {
      if (ahead.done()) return;
      uint64_t* full = &ring.full[load.stage];
      ptx::expect_bytes(full, ahead.bytes);
      ptx::bulk_load(stages + load.stage * kStage, moves.src[moves.rank(ahead.box)] + ahead.src,
                     ahead.bytes, full);
      load.next(depth);
      ahead.next();
    };
    const int storing = depth / 2;
    ptx::fence_proxy_async_global();
    PURLIN_ROLLED
    for (int i = storing; i < depth; ++i) start();
    PURLIN_ROLLED
    for (; !walk.done(); walk.next()) {
      await(ring, phases, store.stage);
      ptx::bulk_store(moves.dst[moves.rank(walk.box)] + walk.dst, stages + store.stage * kStage,
                      walk.bytes);
      ptx::commit_bulk();
      store.next(depth);
      switch (storing) {
        case 2: ptx::await_bulk_read<2>(); break;
        case 1: ptx::await_bulk_read<1>(); break;
        default: ptx::await_bulk_read<0>();
      }
      start();
    }
    ring.phases = phases;
    ptx::await_bulk_written();
  }

  template <class T, class Acc, class Op>
  __device__ __noinline__ static void reduce_any(Team team, char* scratch, int depth, char* dst,
                                                 const char* const* src, int world,
                                                 const Plan& plan, Range range) {
    uint64_t all = Base::address(dst);
    for (int q = 0; q < world; ++q) all |= Base::address(src[q]);
    Range bulk = bulk_part(plan, range, Base::alignment(all, plan));
    if (!plan.contiguous()) bulk.end = bulk.begin;
    __syncthreads();  // the ring is the block's, and its phases are read by all
    if (bulk.begin < bulk.end) reduce_bulk<T, Acc, Op>(team, scratch, depth, dst, src, world, bulk);
    Base::template reduce_team<T, Acc, Op>(team, dst, src, world, plan, {bulk.end, range.end});
  }

  // A stage holds a tile of every rank. Threads store results themselves.
  template <class T, class Acc, class Op>
  __device__ static void reduce_bulk(Team team, char* scratch, int depth, char* dst,
                                     const char* const* src, int world, Range range) {
    Ring& ring = ring_of(scratch);
    char* stages = stages_of(scratch);
    const int tile = depth * kStage / (kTiles * world) / 128 * 128;
    uint32_t phases = ring.phases;
    Place load, full;
    const bool leads = team.thread == 0;
    int64_t next = range.begin;
    const auto start = [&] {
      if (next >= range.end) return;
      const int64_t left = range.end - next;
      const auto bytes = static_cast<uint32_t>(left < tile ? left : tile);
      uint64_t* barrier = &ring.full[load.stage];
      ptx::expect_bytes(barrier, bytes * world);
      for (int q = 0; q < world; ++q)
        ptx::bulk_load(stages + (load.stage * world + q) * tile, src[q] + next, bytes, barrier);
      load.next(kTiles);
      next += tile;
    };
    if (leads) {
      ptx::fence_proxy_async_global();
      for (int i = 0; i < kTiles; ++i) start();
    }
    for (int64_t at = range.begin; at < range.end; at += tile) {
      const int64_t left = range.end - at;
      const int bytes = static_cast<int>(left < tile ? left : tile);
      const char* tiles = stages + full.stage * world * tile;
      await(ring, phases, full.stage);
      for (int i = team.thread * 16; i < bytes; i += team.threads * 16) {
        typename Base::template Folded<T, Acc, Op, uint4> folded;
        for (int q = 0; q < world; ++q)
          folded.add(ptx::load_shared_16(tiles + q * tile + i), q == 0);
        ptx::store(dst + at + i, folded.result());
      }
      full.next(kTiles);
      __syncthreads();
      if (leads) start();
    }
    __syncthreads();
    if (leads) ring.phases = phases;
  }
};

struct HopperAtom : Bulk<GenericAtom> {
  static constexpr const char* kName = "hopper";
  static constexpr int kLeast = 90;
};

}  // namespace purlin
