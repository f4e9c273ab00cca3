// All PTX of the project; each wrapper is named for its ordering and scope (PTX ISA, "Memory
// Consistency Model"). `sys` scope: seen by every GPU and the host.
#pragma once

#include <cstdint>

#include "atom/pair.h"

namespace purlin::ptx {

// One 64-bit word. Relaxed orders nothing else.
__device__ inline void store_relaxed_sys(uint64_t* at, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
__device__ inline uint64_t load_relaxed_sys(const uint64_t* at) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}

// A plain load that the compiler leaves where it stands.
__device__ inline uint64_t load_word(const uint64_t* at) {
  uint64_t v;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(at));
  return v;
}

// Whoever acquires `v` sees what this thread, and threads it has met at a barrier, did before.
__device__ inline void store_release_sys(uint64_t* at, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
__device__ inline uint64_t load_acquire_sys(const uint64_t* at) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}

// Orders everything before it before everything after it, for this thread and those it has met.
__device__ inline void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Sixteen bytes that are seen whole or not at all: one scalar b128 access, never a vector of
// smaller ones (PTX ISA 8.3, sm_70). Orders nothing else.
__device__ inline void store_pair_relaxed_sys(Pair* at, Pair v) {
  asm volatile(
      "{\n\t.reg .b128 t;\n\tmov.b128 t, {%1, %2};\n\tst.relaxed.sys.global.b128 [%0], t;\n\t}" ::
          "l"(at),
      "l"(v.low), "l"(v.high)
      : "memory");
}
__device__ inline Pair load_pair_relaxed_sys(const Pair* at) {
  Pair v;
  asm volatile(
      "{\n\t.reg .b128 t;\n\tld.relaxed.sys.global.b128 t, [%2];\n\tmov.b128 {%0, %1}, t;\n\t}"
      : "=l"(v.low), "=l"(v.high)
      : "l"(at)
      : "memory");
  return v;
}

// Nanoseconds of a clock that all multiprocessors of a GPU share; ticks coarsely.
__device__ inline uint64_t global_timer_ns() {
  uint64_t v;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v)::"memory");
  return v;
}

// Ends the kernel with an error that the host sees; the context is lost.
__device__ inline void trap() { asm volatile("trap;"); }

}  // namespace purlin::ptx
