// The reductions that differ in what they do to bits, numbered: fewer than pairs of operator and
// type. Sums of signed and unsigned integers are one, and so are those of complex numbers and their
// parts.
#pragma once

#include <iterator>
#include <string_view>
#include <type_traits>

#include "layout/dtypes.h"

namespace purlin {

namespace detail {

template <class T>
struct Parts {
  using Type = T;
};
template <class T>
struct Parts<Complex<T>> {
  using Type = T;
};

template <class T>
using Unsigned = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>,
                                             std::type_identity<T>>::type;

// What `Op` on elements of `Type` is carried out on.
template <class Type, class Op>
struct Carrier {
  using Item = typename Type::Item;
  using Acc = typename Type::Accumulator;
  static constexpr bool kBits =
      std::is_same_v<Op, And> || std::is_same_v<Op, Or> || std::is_same_v<Op, Xor>;
  static constexpr bool kSum = std::is_same_v<Op, Sum>;

  using Part = std::conditional_t<kSum, typename Parts<Item>::Type, Item>;
  using PartAcc = std::conditional_t<kSum, typename Parts<Acc>::Type, Acc>;
  using type =
      std::conditional_t<kBits, Dtype<uint64_t, uint64_t>,
                         std::conditional_t<kSum || std::is_same_v<Op, Prod>,
                                            Dtype<Unsigned<Part>, Unsigned<PartAcc>>, Type>>;
};

template <class Type, class Op>
inline constexpr bool kIsCarrier = std::is_same_v<typename Carrier<Type, Op>::type, Type>;

// Place of a type in the table.
template <class Type>
constexpr int place_of_dtype() {
  int place = 0, found = -1;
#define PURLIN_ROW(name, item, accumulator)                                       \
  if (std::is_same_v<Type, Dtype<item, accumulator>> && found < 0) found = place; \
  ++place;
  PURLIN_REDUCE_DTYPES(PURLIN_ROW)
#undef PURLIN_ROW
  return found;
}
template <class Op>
constexpr int place_of_op() {
  int place = 0, found = -1;
#define PURLIN_ROW(name, functor)                              \
  if (std::is_same_v<Op, functor> && found < 0) found = place; \
  ++place;
  PURLIN_REDUCE_OPS(PURLIN_ROW)
#undef PURLIN_ROW
  return found;
}

}  // namespace detail

// Number of what `Op` on elements of `Type` is carried out on.
template <class Type, class Op>
inline constexpr int kFold =
    detail::place_of_op<Op>() * static_cast<int>(std::size(kReduceDtypes)) +
    detail::place_of_dtype<typename detail::Carrier<Type, Op>::type>();

// The same for their names, or -1 where the reduction makes no sense.
inline int find_fold_number(std::string_view op, std::string_view dtype) {
  int found = -1;
  with_dtype(dtype, [&](auto type) {
    with_op(op, [&](auto functor) {
      using Op = decltype(functor);
      using Type = decltype(type);
      if constexpr (Op::template kFits<typename Type::Accumulator>) found = kFold<Type, Op>;
    });
  });
  return found;
}

}  // namespace purlin
