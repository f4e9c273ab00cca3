// The table of element types that reductions know, with the type each accumulates in.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "layout/host_device.h"

namespace purlin {

// IEEE-like 16-bit float with the exponent of f32.
struct Bfloat16 {
  uint16_t bits;
};

PURLIN_HD inline float widen(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}
PURLIN_HD inline float widen(float x) { return x; }

// Rounds to nearest even; a NaN stays a NaN, also where its payload is in the dropped bits.
template <class T>
PURLIN_HD T narrow(float x);

template <>
PURLIN_HD inline Bfloat16 narrow<Bfloat16>(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
PURLIN_HD inline float narrow<float>(float x) {
  return x;
}

// The reductions. Each folds the next rank's value into what has been gathered so far.
struct Sum {
  template <class A>
  PURLIN_HD static A fold(A so_far, A next) {
    return so_far + next;
  }
};

template <class ItemType, class AccumulatorType>
struct Dtype {
  using Item = ItemType;
  using Accumulator = AccumulatorType;
};

// The two tables: X(name as numpy spells it, element type, accumulator type) and X(name, functor).
#define PURLIN_REDUCE_DTYPES(X) \
  X(float32, float, float)      \
  X(bfloat16, Bfloat16, float)
#define PURLIN_REDUCE_OPS(X) X(sum, Sum)

#define PURLIN_NAME(row, ...) #row,
inline constexpr const char* kReduceDtypes[] = {PURLIN_REDUCE_DTYPES(PURLIN_NAME)};
inline constexpr const char* kReduceOps[] = {PURLIN_REDUCE_OPS(PURLIN_NAME)};
#undef PURLIN_NAME

// Calls f(Dtype<...>()) for the row called `name`; false if there is none.
template <class F>
bool with_dtype(std::string_view name, F f) {
#define PURLIN_ROW(row, item, accumulator) \
  if (name == #row) return f(Dtype<item, accumulator>()), true;
  PURLIN_REDUCE_DTYPES(PURLIN_ROW)
#undef PURLIN_ROW
  return false;
}

// Calls f(Op()) for the row called `name`; false if there is none.
template <class F>
bool with_op(std::string_view name, F f) {
#define PURLIN_ROW(row, functor) \
  if (name == #row) return f(functor()), true;
  PURLIN_REDUCE_OPS(PURLIN_ROW)
#undef PURLIN_ROW
  return false;
}

}  // namespace purlin
