// A block of a CUDA kernel: one CTA, with waits that end in a report rather than never.
#pragma once

#include <cstdint>

#include "atom/ptx.cuh"
#include "atom/tag.h"
#include "snac/call.h"
#include "snac/watch.h"

namespace purlin {

struct CudaShared {
  union {  // a call reads or writes its peers
    const char* from[kMaxOperands][kMaxRanks];
    char* to[kMaxOperands][kMaxRanks];
  };
  const char* results[kMaxOperands][kMaxRanks];
  Counts counts;
};

extern __shared__ Line cuda_scratch[];

template <class Packet>
class CudaBlock {
 public:
  // A rank is a grid, unless several virtual ranks share one: then index and count are given.
  __device__ CudaBlock(CudaShared& shared, const Call<Packet>& call, const Watch& watch)
      : CudaBlock(shared, call, watch, blockIdx.x, gridDim.x) {}
  __device__ CudaBlock(CudaShared& shared, const Call<Packet>& call, const Watch& watch, int index,
                       int count)
      : shared_(shared), call_(call), watch_(watch), index_(index), count_(count) {}

  __device__ int index() const { return index_; }
  __device__ int count() const { return count_; }
  __device__ int thread() const { return threadIdx.x; }
  __device__ int threads() const { return blockDim.x; }
  __device__ CudaShared& shared() { return shared_; }
  __device__ void sync() const { __syncthreads(); }

  // Memory of the block for its Atom, enough for as many stages.
  __device__ char* scratch() const { return reinterpret_cast<char*>(cuda_scratch); }
  __device__ int depth() const { return call_.depth; }

  // Counts the call.
  __device__ void record() const {
    if (index_ == 0 && threadIdx.x == 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(watch_.calls), 1ull);
  }

  // Once before announcements: what this thread did, and those it has met, comes first.
  __device__ static void release() { ptx::fence_acq_rel_sys(); }

  // Tells a peer where an operand lies. Address and flag are one access.
  __device__ static void announce(Notify* at, uint64_t address, uint64_t flag) {
    ptx::store_pair_relaxed_sys(reinterpret_cast<Pair*>(at), {address, flag});
  }
  // Waits for the announcement with `flag`, and for what its sender did before it.
  __device__ uint64_t receive(const Notify* at, uint64_t flag, Where where) {
    Pair seen;
    while ((seen = ptx::load_pair_acquire_sys(reinterpret_cast<const Pair*>(at))).high != flag)
      stalled(where, flag, seen.high);
    relax();
    return seen.low;
  }

  // Releases everything that this block did before its last sync.
  __device__ static void signal(uint64_t* at, uint64_t v) { ptx::store_release_sys(at, v); }

  // Acquires what the peer released with `v` or a later value.
  __device__ void await(const uint64_t* at, uint64_t v, Where where) {
    uint64_t seen;
    while ((seen = ptx::load_acquire_sys(at)) < v) stalled(where, v, seen);
    relax();
  }

  // Called once for each look that found nothing. Its rare ends are inlined or never return: a call
  // that does would have the waiting loops keep their state in memory.
  __device__ void stalled(Where where, uint64_t expected, uint64_t seen) {
    if (++spins_ % kSpinsPerCheck != 0) return;
    if (spins_ == kSpinsPerCheck) start_ns_ = ptx::global_timer_ns();
    if (ptx::load_relaxed_sys(&call_.control().poison) != 0) {
      if (doomed_) abandon(call_, watch_, index_, where, expected);
      // One more look: the peer may have done its part just before.
      doomed_ = true;
      --spins_;
      return;
    }
    const bool flags = where.phase != Phase::kLeave;
    if (flags && expected != seen && epoch_of(expected) == epoch_of(seen))
      fail(call_, watch_, index_, Alarm::kDisagree, where, expected, seen);
    const uint64_t waited = ptx::global_timer_ns() - start_ns_;
    const uint64_t budget = ptx::load_relaxed_sys(&watch_.limits->budget_ns);
    if (budget != 0 && waited > budget)
      fail(call_, watch_, index_, Alarm::kExpired, where, expected, seen);
    if (waited > ptx::load_relaxed_sys(&watch_.limits->slow_ns) &&
        is_first(&call_.control().slow, epoch_in(where, expected)))
      write(call_, watch_, index_, Alarm::kSlow, where, expected, seen);
  }
  __device__ void relax() {
    spins_ = 0;
    doomed_ = false;
  }

  // Ends the call on all ranks, for counts that would write out of bounds.
  __device__ void refuse(const Finding& found, int peer) const {
    if (found.fault != Fault::kNone)
      fail(call_, watch_, index_, Alarm::kBadCounts, {Phase::kEnter, peer, found.fault},
           static_cast<uint64_t>(found.limit), static_cast<uint64_t>(found.value));
  }

 private:
  static constexpr uint32_t kSpinsPerCheck = 1024;  // about half a millisecond
  static constexpr uint64_t kGraceNs = 500000000;

  // True for the first caller that raises a word of this device's window to `value`.
  __device__ static bool is_first(uint64_t* word, uint64_t value) {
    return atomicMax(reinterpret_cast<unsigned long long*>(word),
                     static_cast<unsigned long long>(value)) < value;
  }

  // Flags hold the epoch and a tag; the words of the exit hold the epoch alone.
  __device__ static uint64_t epoch_in(Where where, uint64_t expected) {
    return where.phase == Phase::kLeave ? expected : epoch_of(expected);
  }

  __device__ __forceinline__ static void write(const Call<Packet>& call, const Watch& watch,
                                               int block, Alarm alarm, Where where,
                                               uint64_t expected, uint64_t seen) {
    Report& r = *watch.report;
    r.epoch =
        alarm == Alarm::kBadCounts ? call.control().epoch[block] + 1 : epoch_in(where, expected);
    r.fault = where.fault;
    r.expected = expected;
    r.seen = seen;
    r.tag = call.tag;
    r.row = watch.row;
    r.rank = call.rank;
    r.world = call.world;
    r.peer = where.peer;
    r.block = block;
    r.group = watch.group;
    r.phase = where.phase;
    ptx::store_release_sys(&r.alarm, static_cast<uint64_t>(alarm));
  }

  // No waiting kernel may return after this: a late peer would write into memory that somebody else
  // owns by then. The report is written, peers are told, and the context is given up.
  [[noreturn]] __device__ __noinline__ static void fail(const Call<Packet>& call,
                                                        const Watch& watch, int block, Alarm alarm,
                                                        Where where, uint64_t expected,
                                                        uint64_t seen) {
    if (is_first(&call.control().failed, 1)) {
      write(call, watch, block, alarm, where, expected, seen);
      for (int p = 0; p < call.world; ++p)
        ptx::store_relaxed_sys(&call.window[p].control().poison, kGivenUp);
    }
    end();
  }

  // Others have said why, unless a process has ended.
  [[noreturn]] __device__ __noinline__ static void abandon(const Call<Packet>& call,
                                                           const Watch& watch, int block,
                                                           Where where, uint64_t expected) {
    const uint64_t poison = ptx::load_relaxed_sys(&call.control().poison);
    if (poison >= kEnded && is_first(&call.control().failed, 1))
      write(call, watch, block, Alarm::kLost, where, expected, poison - kEnded);
    end();
  }

  // The host's watcher gets the time to print the report before an error ends the program.
  [[noreturn]] __device__ __noinline__ static void end() {
    const uint64_t start = ptx::global_timer_ns();
    while (ptx::global_timer_ns() - start < kGraceNs) __nanosleep(1000000);
    for (;;) ptx::trap();
  }

  CudaShared& shared_;
  const Call<Packet>& call_;
  const Watch& watch_;
  const int index_, count_;
  uint32_t spins_ = 0;
  bool doomed_ = false;
  uint64_t start_ns_ = 0;
};

}  // namespace purlin
