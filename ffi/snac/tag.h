// The call-site tag that flags carry: ranks that run different calls must not exchange data.
#pragma once

#include <cstdint>

namespace purlin {

inline constexpr int kTagBits = 16;
inline constexpr uint64_t kTagMask = (1u << kTagBits) - 1;

}  // namespace purlin
