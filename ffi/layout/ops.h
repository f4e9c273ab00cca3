// The reductions. Each folds the next rank's value into what has been gathered so far.
#pragma once

#include <cstdint>
#include <type_traits>

#include "layout/host_device.h"

namespace purlin {

template <class T>
struct Complex {
  T re, im;
};

struct Bool {  // as XLA stores it: one byte, 0 or 1
  uint8_t value;
};

template <class T>
inline constexpr bool kIsComplex = false;
template <class T>
inline constexpr bool kIsComplex<Complex<T>> = true;
template <class T>
inline constexpr bool kIsBool = std::is_same_v<T, Bool>;

// Integers wrap around, which signed arithmetic may not.
template <class T, class F>
PURLIN_HD T wrapping(T a, T b, F f) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    using Wide = std::conditional_t<(sizeof(U) < 4), uint32_t, U>;  // no promotion to int
    return static_cast<T>(static_cast<U>(
        f(static_cast<Wide>(static_cast<U>(a)), static_cast<Wide>(static_cast<U>(b)))));
  } else {
    return f(a, b);
  }
}

struct Sum {
  template <class A>
  static constexpr bool kFits = !kIsBool<A>;
  template <class A>
  PURLIN_HD static A fold(A a, A b) {
    if constexpr (kIsComplex<A>)
      return {a.re + b.re, a.im + b.im};
    else
      return wrapping(a, b, [](auto x, auto y) { return x + y; });
  }
};

struct Prod {
  template <class A>
  static constexpr bool kFits = !kIsBool<A>;
  template <class A>
  PURLIN_HD static A fold(A a, A b) {
    if constexpr (kIsComplex<A>)
      return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    else
      return wrapping(a, b, [](auto x, auto y) { return x * y; });
  }
};

// The larger or the smaller value, or NaN where either is one, whichever rank holds it.
template <bool larger>
struct Extreme {
  template <class A>
  static constexpr bool kFits = !kIsBool<A> && !kIsComplex<A>;
  template <class A>
  PURLIN_HD static A fold(A a, A b) {
    return a != a || (larger ? a > b : a < b) ? a : b;
  }
};
using Max = Extreme<true>;
using Min = Extreme<false>;

// Of integers and booleans, bit by bit.
template <class F>
struct Bitwise {
  template <class A>
  static constexpr bool kFits = std::is_integral_v<A> || kIsBool<A>;
  template <class A>
  PURLIN_HD static A fold(A a, A b) {
    if constexpr (kIsBool<A>)
      return {static_cast<uint8_t>(F::of(a.value, b.value))};
    else
      return static_cast<A>(F::of(a, b));
  }
};

struct BitAnd {
  PURLIN_HD static constexpr auto of(auto a, auto b) { return a & b; }
};
struct BitOr {
  PURLIN_HD static constexpr auto of(auto a, auto b) { return a | b; }
};
struct BitXor {
  PURLIN_HD static constexpr auto of(auto a, auto b) { return a ^ b; }
};
using And = Bitwise<BitAnd>;
using Or = Bitwise<BitOr>;
using Xor = Bitwise<BitXor>;

}  // namespace purlin
