// Floats of 16 and 8 bits as storage: each widens to float exactly and is rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#include "layout/host_device.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace purlin {

// What the largest codes stand for.
//   kIeee   infinities, and NaNs above them
//   kFn     no infinity; the largest magnitude is NaN
//   kFnuz   no infinity and no -0, whose code is NaN
enum class Special : uint8_t { kIeee, kFn, kFnuz };

template <class Bits, int mantissa, int bias, Special special>
struct MiniFloat {
  Bits bits;

  static constexpr int kMantissa = mantissa;
  static constexpr int kBias = bias;
  static constexpr Special kSpecial = special;
  static constexpr int kShift = 23 - mantissa;  // of the mantissa's place in a float
  static constexpr uint32_t kSign = 1u << (8 * sizeof(Bits) - 1);
  static constexpr uint32_t kMagnitude = kSign - 1;
  static constexpr uint32_t kLeastNormal = 1u << mantissa;
  // The first magnitude that is no finite number.
  static constexpr uint32_t kBeyond = special == Special::kIeee
                                          ? (kMagnitude >> mantissa) << mantissa
                                      : special == Special::kFn ? kMagnitude
                                                                : kMagnitude + 1;
};

using Float16 = MiniFloat<uint16_t, 10, 15, Special::kIeee>;
using Bfloat16 = MiniFloat<uint16_t, 7, 127, Special::kIeee>;
using Float8E3M4 = MiniFloat<uint8_t, 4, 3, Special::kIeee>;
using Float8E4M3 = MiniFloat<uint8_t, 3, 7, Special::kIeee>;
using Float8E5M2 = MiniFloat<uint8_t, 2, 15, Special::kIeee>;
using Float8E4M3Fn = MiniFloat<uint8_t, 3, 7, Special::kFn>;
using Float8E4M3Fnuz = MiniFloat<uint8_t, 3, 8, Special::kFnuz>;
using Float8E4M3B11Fnuz = MiniFloat<uint8_t, 3, 11, Special::kFnuz>;
using Float8E5M2Fnuz = MiniFloat<uint8_t, 2, 16, Special::kFnuz>;

PURLIN_HD inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
PURLIN_HD inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// 2^e as a float, for e in the range of normal floats.
PURLIN_HD constexpr uint32_t power_of_two(int e) { return static_cast<uint32_t>(e + 127) << 23; }

template <class Bits, int mantissa, int bias, Special special>
PURLIN_HD float widen(MiniFloat<Bits, mantissa, bias, special> x) {
  using Mini = MiniFloat<Bits, mantissa, bias, special>;
#if defined(__CUDA_ARCH__)
  if constexpr (mantissa == 10) return __half2float(__ushort_as_half(x.bits));
#endif
  if constexpr (bias == 127) {
    return float_of_bits(static_cast<uint32_t>(x.bits) << 16);
  } else {
    const uint32_t magnitude = x.bits & Mini::kMagnitude;
    const uint32_t sign = (x.bits & Mini::kSign) != 0 ? 0x80000000u : 0u;
    const bool fnuz = special == Special::kFnuz;
    const bool nan =
        fnuz ? x.bits == Mini::kSign
             : magnitude > Mini::kBeyond || (special == Special::kFn && magnitude == Mini::kBeyond);
    if (nan) return float_of_bits(sign | 0x7fc00000u);
    if (special == Special::kIeee && magnitude == Mini::kBeyond)
      return float_of_bits(sign | 0x7f800000u);
    if (magnitude < Mini::kLeastNormal) {
      const float value =
          static_cast<float>(magnitude) * float_of_bits(power_of_two(1 - bias - mantissa));
      return float_of_bits(sign | bits_of_float(value));
    }
    return float_of_bits(sign | ((magnitude << Mini::kShift) + (uint32_t{127 - bias} << 23)));
  }
}

template <class Mini>
PURLIN_HD Mini nan_of(uint32_t sign) {
  if (Mini::kSpecial == Special::kFnuz) return {static_cast<decltype(Mini::bits)>(Mini::kSign)};
  const uint32_t quiet = Mini::kSpecial == Special::kIeee
                             ? Mini::kBeyond | (Mini::kLeastNormal >> 1)
                             : Mini::kMagnitude;
  return {static_cast<decltype(Mini::bits)>(sign | quiet)};
}

// Rounds to nearest even; beyond the largest number lies infinity, or NaN where there is none. A
// NaN stays a NaN.
template <class Mini>
PURLIN_HD Mini narrow_mini(float x) {
  using Bits = decltype(Mini::bits);
#if defined(__CUDA_ARCH__)
  if constexpr (Mini::kMantissa == 10) return {__half_as_ushort(__float2half_rn(x))};
#endif
  const uint32_t bits = bits_of_float(x);
  const uint32_t sign = (bits >> 31) != 0 ? Mini::kSign : 0;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return nan_of<Mini>(sign);
  uint32_t code;
  if (Mini::kBias == 127 || magnitude >= power_of_two(1 - Mini::kBias)) {
    constexpr uint32_t kHalf = (1u << (Mini::kShift - 1)) - 1;
    code = (magnitude + kHalf + ((magnitude >> Mini::kShift) & 1u)) >> Mini::kShift;
    code -= uint32_t{127 - Mini::kBias} << Mini::kMantissa;
  } else {
    // A number whose last place is the least step of the format: the addition rounds.
    const uint32_t magic = power_of_two(1 - Mini::kBias - Mini::kMantissa + 23);
    code = bits_of_float(float_of_bits(magnitude) + float_of_bits(magic)) - magic;
  }
  if (code >= Mini::kBeyond) {
    if (Mini::kSpecial != Special::kIeee) return nan_of<Mini>(sign);
    code = Mini::kBeyond;
  }
  if (Mini::kSpecial == Special::kFnuz && code == 0) return {0};
  return {static_cast<Bits>(sign | code)};
}

}  // namespace purlin
