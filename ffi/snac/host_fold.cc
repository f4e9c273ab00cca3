// Instances of the host's reductions: one function for each element type and operator.
#include "layout/dtypes.h"
#include "snac/host_reduce.h"

namespace purlin {
namespace {

template <class Type, class Op>
HostFold fold_of() {
  using Item = typename Type::Item;
  using Acc = typename Type::Accumulator;
  if constexpr (Op::template kFits<Acc>)
    return {&CpuAtom::fold<Item, Acc, Op>, static_cast<int64_t>(sizeof(Item))};
  else
    return {};
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
