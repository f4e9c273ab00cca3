// All PTX of the project; each wrapper is named for its ordering and scope (PTX ISA, "Memory
// Consistency Model"). `sys` scope: seen by every GPU and the host.
#pragma once

#include <cstdint>
#include <cstring>

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
// Whoever sees the pair that was stored after a fence sees what was done before the fence. Cheaper
// than a fence of its own, which costs a GPU 0.9 us.
__device__ inline Pair load_pair_acquire_sys(const Pair* at) {
  Pair v;
  asm volatile(
      "{\n\t.reg .b128 t;\n\tld.acquire.sys.global.b128 t, [%2];\n\tmov.b128 {%0, %1}, t;\n\t}"
      : "=l"(v.low), "=l"(v.high)
      : "l"(at)
      : "memory");
  return v;
}

// One thread's sixteen bytes of a 128-byte line that eight neighbouring threads of a warp access in
// one instruction. Orders nothing else.
__device__ inline void store_piece_relaxed_sys(Pair* at, Pair v) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(v.low), "l"(v.high)
               : "memory");
}
__device__ inline Pair load_piece_relaxed_sys(const Pair* at) {
  Pair v;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(v.low), "=l"(v.high)
               : "l"(at)
               : "memory");
  return v;
}

// Plain accesses of the width of V, never through the non-coherent path.
template <class V>
__device__ inline V load(const char* at) {
  return *reinterpret_cast<const V*>(at);
}
template <class V>
__device__ inline void store(char* at, const V& v) {
  *reinterpret_cast<V*>(at) = v;
}

// An address in shared memory as instructions take it.
__device__ inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Sixteen bytes of shared memory in one access.
__device__ inline uint4 load_shared_16(const void* at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address(at))
               : "memory");
  return v;
}

// Copies sixteen bytes to shared memory while the thread goes on (sm_80).
__device__ inline void copy_async_16(void* to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ inline void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last `pending` groups of this thread have arrived.
template <int pending>
__device__ inline void await_async() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Barriers in shared memory that count the bytes of bulk copies (sm_90).
__device__ inline void init_barrier(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ inline void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ inline void await_barrier(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0)
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// Bulk copies, in multiples of sixteen bytes, by the async proxy: fences order them with what
// threads read and write themselves.
__device__ inline void bulk_load(void* to, const char* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
__device__ inline void bulk_store(char* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ inline void commit_bulk() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the sources of all but the last `pending` groups of stores may be overwritten.
template <int pending>
__device__ inline void await_bulk_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
// Until everything stored is where it belongs, so that a later release covers it.
__device__ inline void await_bulk_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// What this thread has acquired is seen by bulk copies that it starts.
__device__ inline void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// What the threads of the block have written to shared memory is seen by bulk copies.
__device__ inline void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Thirty-two bytes in one access (sm_100).
struct alignas(32) Wide {
  uint64_t word[4];
};
template <>
__device__ inline Wide load<Wide>(const char* at) {
  Wide v;
  asm volatile("ld.global.v4.u64 {%0, %1, %2, %3}, [%4];"
               : "=l"(v.word[0]), "=l"(v.word[1]), "=l"(v.word[2]), "=l"(v.word[3])
               : "l"(at)
               : "memory");
  return v;
}
template <>
__device__ inline void store<Wide>(char* at, const Wide& v) {
  asm volatile("st.global.v4.u64 [%0], {%1, %2, %3, %4};" ::"l"(at), "l"(v.word[0]), "l"(v.word[1]),
               "l"(v.word[2]), "l"(v.word[3])
               : "memory");
}

// Two sums, each rounded to nearest (sm_100).
__device__ inline float2 add_pair(float2 a, float2 b) {
  uint64_t sum, x, y;
  memcpy(&x, &a, 8), memcpy(&y, &b, 8);
  asm("add.rn.f32x2 %0, %1, %2;" : "=l"(sum) : "l"(x), "l"(y));
  float2 result;
  memcpy(&result, &sum, 8);
  return result;
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
