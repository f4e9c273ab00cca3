// Whether two arrays hold the same values, bit for bit. A NaN is any NaN: processors differ in
// which.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "layout/dtypes.h"

namespace purlin {

template <class T>
bool is_nan(T x) {
  const auto wide = widen(x);
  using Wide = std::remove_cv_t<decltype(wide)>;
  if constexpr (kIsComplex<Wide>)
    return wide.re != wide.re || wide.im != wide.im;
  else if constexpr (kIsBool<Wide>)
    return false;
  else
    return wide != wide;
}

template <class T>
int64_t differing(const char* ours, const char* theirs, int64_t items) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < items; ++i) {
    T a, b;
    std::memcpy(&a, ours + i * sizeof(T), sizeof(T));
    std::memcpy(&b, theirs + i * sizeof(T), sizeof(T));
    wrong += std::memcmp(&a, &b, sizeof(T)) != 0 && !(is_nan(a) && is_nan(b));
  }
  return wrong;
}

}  // namespace purlin
