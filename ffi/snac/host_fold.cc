// Instances of the host's reductions: one function for each element type and operator.
#include "layout/dtypes.h"
#include "snac/host_reduce.h"

namespace purlin {
namespace {

// What is worth the code of the fast path: it takes several times as long to compile.
template <class Item, class Acc, class Op>
inline constexpr bool kUsual =
    std::is_arithmetic_v<Acc> && sizeof(Item) >= 2 &&
    (std::is_same_v<Op, Sum> || std::is_same_v<Op, Max> || std::is_same_v<Op, Min>);

template <class Type, class Op>
HostFold fold_of() {
  using Item = typename Type::Item;
  using Acc = typename Type::Accumulator;
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Item));
  if constexpr (!Op::template kFits<Acc>)
    return {};
  else if constexpr (kUsual<Item, Acc, Op>)
    return {CpuAtom::fast_fold<Item, Acc, Op>(), kBytes};
  else
    return {&CpuAtom::fold<Item, Acc, Op>, kBytes};
}

}  // namespace

HostFold find_fold(std::string_view op, std::string_view dtype) {
  HostFold found;
  with_dtype(dtype, [&](auto type) {
    using Type = decltype(type);
    with_op(op, [&](auto fold) { found = fold_of<Type, decltype(fold)>(); });
  });
  return found;
}

}  // namespace purlin
