// The regimes: their names, and which collectives each of them fits.
#pragma once

#include <cstdint>
#include <string_view>

#include "layout/collectives.h"
#include "layout/host_device.h"

namespace purlin {

enum class Regime : uint8_t {
  kMeet,
  kPacket,
  kLine,
  kStaged,
  kZeroStaging,
  kZeroStagingPush,
  kComposed,
  kZeroStagingComposed,
};
inline constexpr const char* kRegimeNames[] = {"meet",         "packet",
                                               "line",         "staged",
                                               "zero_staging", "zero_staging_push",
                                               "composed",     "zero_staging_composed"};
inline constexpr int kNumRegimes = sizeof(kRegimeNames) / sizeof(kRegimeNames[0]);

// Number of the regime called `name`, or -1.
inline int find_regime(std::string_view name) {
  for (int i = 0; i < kNumRegimes; ++i)
    if (name == kRegimeNames[i]) return i;
  return -1;
}

// Whether a regime makes sense for a collective.
constexpr bool fits(Regime regime, const Collective& row) {
  if (row.counted)
    return regime == Regime::kMeet || regime == Regime::kPacket || regime == Regime::kStaged ||
           regime == Regime::kZeroStaging;
  if (regime == Regime::kZeroStagingPush) return row.consume == Consume::kCopy;
  if (regime == Regime::kComposed || regime == Regime::kZeroStagingComposed)
    return row.is_uniform();
  return true;
}

// Whether data goes through the staging of the windows.
constexpr bool is_staged(Regime regime) {
  return regime == Regime::kStaged || regime == Regime::kComposed;
}

// What takes the place of a regime where ranks cannot reach each other's arrays.
constexpr Regime without_lending(Regime regime) {
  if (regime == Regime::kZeroStagingComposed) return Regime::kComposed;
  return regime == Regime::kZeroStaging || regime == Regime::kZeroStagingPush ? Regime::kStaged
                                                                              : regime;
}

// Whether ranks read or write each other's arrays where they lie.
constexpr bool is_lent(Regime regime) { return without_lending(regime) != regime; }

// Whether data and flags travel together, in words of eight bytes on GPUs.
PURLIN_HD constexpr bool is_flagged(Regime regime) {
  return regime == Regime::kPacket || regime == Regime::kLine;
}

// Whether a collective whose result lies where its input did may overwrite it: nobody reads an
// input after a result has been written to its place.
constexpr bool in_place(Regime regime, const Collective& row) {
  return row.is_uniform() && regime != Regime::kZeroStaging && regime != Regime::kZeroStagingPush;
}

}  // namespace purlin
