// The tables of element types and reductions, with the type that each element accumulates in.
#pragma once

#include <cstdint>
#include <string_view>

#include "layout/minifloat.h"
#include "layout/ops.h"

namespace purlin {

// X(name as numpy spells it, element type, accumulator type)
#define PURLIN_REDUCE_DTYPES(X)                   \
  X(bool, Bool, Bool)                             \
  X(int8, int8_t, int8_t)                         \
  X(int16, int16_t, int16_t)                      \
  X(int32, int32_t, int32_t)                      \
  X(int64, int64_t, int64_t)                      \
  X(uint8, uint8_t, uint8_t)                      \
  X(uint16, uint16_t, uint16_t)                   \
  X(uint32, uint32_t, uint32_t)                   \
  X(uint64, uint64_t, uint64_t)                   \
  X(float8_e3m4, Float8E3M4, float)               \
  X(float8_e4m3, Float8E4M3, float)               \
  X(float8_e4m3fn, Float8E4M3Fn, float)           \
  X(float8_e4m3fnuz, Float8E4M3Fnuz, float)       \
  X(float8_e4m3b11fnuz, Float8E4M3B11Fnuz, float) \
  X(float8_e5m2, Float8E5M2, float)               \
  X(float8_e5m2fnuz, Float8E5M2Fnuz, float)       \
  X(float16, Float16, float)                      \
  X(bfloat16, Bfloat16, float)                    \
  X(float32, float, float)                        \
  X(float64, double, double)                      \
  X(complex64, Complex<float>, Complex<float>)    \
  X(complex128, Complex<double>, Complex<double>)

// X(name, functor)
#define PURLIN_REDUCE_OPS(X) \
  X(sum, Sum)                \
  X(prod, Prod)              \
  X(max, Max)                \
  X(min, Min)                \
  X(and, And)                \
  X(or, Or)                  \
  X(xor, Xor)

template <class T>
PURLIN_HD T widen(T x) {
  return x;
}

template <class T>
struct Narrow {
  PURLIN_HD static T from(T x) { return x; }
};
template <class Bits, int mantissa, int bias, Special special>
struct Narrow<MiniFloat<Bits, mantissa, bias, special>> {
  using Mini = MiniFloat<Bits, mantissa, bias, special>;
  PURLIN_HD static Mini from(float x) { return narrow_mini<Mini>(x); }
};

// The element of type T nearest to an accumulator.
template <class T, class Acc>
PURLIN_HD T narrow(Acc x) {
  return Narrow<T>::from(x);
}

template <class ItemType, class AccumulatorType>
struct Dtype {
  using Item = ItemType;
  using Accumulator = AccumulatorType;
};

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
