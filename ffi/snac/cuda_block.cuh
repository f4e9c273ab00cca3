// A block of a CUDA kernel: one CTA, with waits that end in a report rather than never.
#pragma once

#include <cstdint>

#include "atom/ptx.cuh"
#include "snac/call.h"
#include "snac/tag.h"
#include "snac/watch.h"

namespace purlin {

struct CudaShared {
  const char* from[kMaxOperands][kMaxRanks];
};

template <class Packet>
class CudaBlock {
 public:
  __device__ CudaBlock(CudaShared& shared, const Call<Packet>& call, const Watch& watch)
      : shared_(shared), call_(call), watch_(watch) {}

  __device__ int index() const { return blockIdx.x; }
  __device__ int count() const { return gridDim.x; }
  __device__ int thread() const { return threadIdx.x; }
  __device__ int threads() const { return blockDim.x; }
  __device__ CudaShared& shared() { return shared_; }
  __device__ void sync() const { __syncthreads(); }

  __device__ static void store(uint64_t* at, uint64_t v) { ptx::store_relaxed_sys(at, v); }
  __device__ static uint64_t load(const uint64_t* at) { return ptx::load_relaxed_sys(at); }

  // Releases everything that this block did before its last sync.
  __device__ static void signal(uint64_t* at, uint64_t v) { ptx::store_release_sys(at, v); }

  // Acquires what the peer released with `v` or a later value.
  __device__ void await(const uint64_t* at, uint64_t v, Where where) {
    uint64_t seen;
    while ((seen = ptx::load_acquire_sys(at)) < v) stalled(where, v, seen);
    relax();
  }

  // Called once for each look that found nothing.
  __device__ void stalled(Where where, uint64_t expected, uint64_t seen) {
    if (++spins_ % kSpinsPerCheck == 0) check(where, expected, seen);
  }
  __device__ void relax() { spins_ = 0; }

  __device__ void disagree(Where where, uint64_t own, uint64_t theirs) {
    fail(Alarm::kDisagree, where, own, theirs);
  }

 private:
  static constexpr uint32_t kSpinsPerCheck = 1024;
  static constexpr uint64_t kSecond = 1000000000;

  __device__ __noinline__ void check(Where where, uint64_t expected, uint64_t seen) {
    const uint64_t now = ptx::global_timer_ns();
    if (spins_ == kSpinsPerCheck) start_ns_ = now;
    if (load(&call_.control().poison) != 0) end();
    if (where.phase == Phase::kPacket && expected >> kTagBits == seen >> kTagBits)
      fail(Alarm::kDisagree, where, expected & kTagMask, seen & kTagMask);
    const uint64_t waited = now - start_ns_;
    const uint64_t budget = load(&watch_.report->budget_ns);
    if (budget != 0 && waited > budget) fail(Alarm::kExpired, where, expected, seen);
    if (waited > load(&watch_.report->slow_ns) && claim(1))
      write(Alarm::kSlow, where, expected, seen);
  }

  // True for the first caller on this device that asks for `right`.
  __device__ bool claim(uint64_t right) const {
    auto* word = reinterpret_cast<unsigned long long*>(&call_.control().claimed);
    return (atomicOr(word, static_cast<unsigned long long>(right)) & right) == 0;
  }

  __device__ void write(Alarm alarm, Where where, uint64_t expected, uint64_t seen) const {
    Report& r = *watch_.report;
    r.epoch = call_.control().epoch[index()] + 1;
    r.expected = expected;
    r.seen = seen;
    r.tag = call_.tag;
    r.row = watch_.row;
    r.rank = call_.rank;
    r.world = call_.world;
    r.peer = where.peer;
    r.block = index();
    r.phase = where.phase;
    ptx::store_release_sys(&r.alarm, static_cast<uint64_t>(alarm));
  }

  // No waiting kernel may return after this: a late peer would write into memory that somebody else
  // owns by then. Peers are told, the report is written, and the context is given up.
  __device__ __noinline__ void fail(Alarm alarm, Where where, uint64_t expected, uint64_t seen) {
    if (claim(2)) {
      write(alarm, where, expected, seen);
      for (int p = 0; p < call_.world; ++p) store(&call_.window[p].control->poison, 1);
    }
    end();
  }

  // The host's watcher gets the time to print the report before an error ends the program.
  __device__ void end() const {
    const uint64_t start = ptx::global_timer_ns();
    while (ptx::global_timer_ns() - start < kSecond / 2) __nanosleep(1000000);
    ptx::trap();
  }

  CudaShared& shared_;
  const Call<Packet>& call_;
  const Watch& watch_;
  uint32_t spins_ = 0;
  uint64_t start_ns_ = 0;
};

}  // namespace purlin
