// Keeps subnormal numbers while it lives: XLA's threads flush them to zero, and ours compute on
// them.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace purlin::threads {

class KeepSubnormals {
 public:
#if defined(__SSE2__)
  KeepSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlushBits); }
  ~KeepSubnormals() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlushBits = 0x8040;  // flush to zero, denormals are zero
  const unsigned saved_;
#elif defined(__aarch64__)
  KeepSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~kFlushBits));
  }
  ~KeepSubnormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  static constexpr uint64_t kFlushBits = uint64_t{1} << 24;
  uint64_t saved_;
#endif
};

}  // namespace purlin::threads
