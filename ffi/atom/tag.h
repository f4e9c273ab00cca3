// The call-site tag that flags carry: ranks that run different calls must not exchange data.
#pragma once

#include <cstdint>

#include "layout/host_device.h"

namespace purlin {

inline constexpr int kTagBits = 16;
inline constexpr uint64_t kTagMask = (1u << kTagBits) - 1;

// Grows with the epoch, and differs between call sites.
PURLIN_HD constexpr uint64_t flag_of(uint64_t epoch, uint64_t tag) {
  return epoch << kTagBits | (tag & kTagMask);
}
PURLIN_HD constexpr uint64_t epoch_of(uint64_t flag) { return flag >> kTagBits; }
PURLIN_HD constexpr uint64_t tag_of(uint64_t flag) { return flag & kTagMask; }

}  // namespace purlin
