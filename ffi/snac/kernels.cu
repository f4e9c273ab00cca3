// Instances of SNAC for one Atom: a kernel is a regime, a consumer and an Atom. The build compiles
// this file once for each Atom, PURLIN_ATOM of PURLIN_ATOM_HEADER, into a namespace PURLIN_KERNELS.
#include "snac/kernels.h"

#include PURLIN_ATOM_HEADER
#include "snac/any_reduce.cuh"
#include "snac/cuda_block.cuh"

// Not an unnamed namespace: its name would be the same in each compilation of this file.
namespace purlin::PURLIN_KERNELS {

using Atom = PURLIN_ATOM;
constexpr bool kGeneric = std::string_view(Atom::kName) == "generic";

template <Regime regime, template <class, class> class View, class Consumer>
__global__ void __launch_bounds__(kMaxThreads)
    run(const __grid_constant__ CudaCall call, const __grid_constant__ Watch watch) {
  __shared__ CudaShared shared;
  CudaBlock<CudaPacket> block(shared, call, watch);
  if constexpr (regime == Regime::kPacket) return packet<Atom, View, Consumer>(block, call);
  if constexpr (regime == Regime::kLine) return line<Atom, View, Consumer>(block, call);
  if constexpr (!is_flagged(regime)) Atom::prepare(block);
  if constexpr (regime == Regime::kStaged) return staged<Atom, Consumer>(block, call);
  if constexpr (regime == Regime::kZeroStaging) return zero_staging<Atom, Consumer>(block, call);
  if constexpr (regime == Regime::kZeroStagingPush) return zero_staging_push<Atom>(block, call);
  if constexpr (regime == Regime::kComposed) return composed<Atom, Consumer>(block, call);
  if constexpr (regime == Regime::kZeroStagingComposed)
    return zero_staging_composed<Atom, Consumer>(block, call);
}

template <Regime regime, template <class, class> class View, class Consumer>
Kernel kernel() {
  return {reinterpret_cast<const void*>(&run<regime, View, Consumer>), 0,
          is_flagged(regime) ? nullptr : &Atom::scratch_bytes};
}

// Packets, lines and composed staging are the generic Atom's, for all.
template <class Consumer>
Kernel find(Regime regime, bool flat) {
  constexpr bool kCopies = std::is_same_v<Consumer, CopyConsumer<Atom>>;
  if constexpr (kGeneric) {
    if (regime == Regime::kPacket)
      return flat ? kernel<Regime::kPacket, FlatWords, Consumer>()
                  : kernel<Regime::kPacket, Words, Consumer>();
    if (regime == Regime::kLine)
      return flat ? kernel<Regime::kLine, FlatWords, Consumer>()
                  : kernel<Regime::kLine, Words, Consumer>();
  }
  if (regime == Regime::kStaged) return kernel<Regime::kStaged, Words, Consumer>();
  if constexpr (kCopies) {
    if (regime == Regime::kZeroStaging) return kernel<Regime::kZeroStaging, Words, Consumer>();
    if (regime == Regime::kZeroStagingPush)
      return kernel<Regime::kZeroStagingPush, Words, Consumer>();
  } else {
    if (regime == Regime::kZeroStaging) return kernel<Regime::kZeroStaging, Words, Consumer>();
    if constexpr (kGeneric)
      if (regime == Regime::kComposed) return kernel<Regime::kComposed, Words, Consumer>();
    if (regime == Regime::kZeroStagingComposed)
      return kernel<Regime::kZeroStagingComposed, Words, Consumer>();
  }
  return {};
}

// The sums that are worth kernels of their own.
template <class F>
bool with_usual(std::string_view op, std::string_view dtype, F f) {
  if (op != "sum") return false;
  if (dtype == "float32") return f(ReduceConsumer<Atom, float, float, Sum>()), true;
  if (dtype == "bfloat16") return f(ReduceConsumer<Atom, Bfloat16, float, Sum>()), true;
  if (dtype == "float16") return f(ReduceConsumer<Atom, Float16, float, Sum>()), true;
  return false;
}

Kernel find(const Wanted& wanted) {
  if (wanted.consume == Consume::kCopy) return find<CopyConsumer<Atom>>(wanted.regime, wanted.flat);
  Kernel found;
  if (with_usual(wanted.op, wanted.dtype, [&](auto consumer) {
        found = find<decltype(consumer)>(wanted.regime, wanted.flat);
      }))
    return found;
  if constexpr (kGeneric) {
    const bool wide = wanted.dtype == "complex128";  // a packet's word holds no such item
    if (wanted.fold < 0 || (wide && is_flagged(wanted.regime))) return {};
    found = find<AnyReduce<Atom>>(wanted.regime, wanted.flat);
    found.fold = wanted.fold;
  }
  return found;
}

std::vector<Kernel> all() {
  std::vector<Kernel> every;
  const auto add = [&](const Wanted& wanted) {
    if (const Kernel found = find(wanted); found.function != nullptr) every.push_back(found);
  };
  for (int r = 0; r < kNumRegimes; ++r)
    for (bool flat : {true, false}) {
      const auto regime = static_cast<Regime>(r);
      add({Atom::kName, regime, Consume::kCopy, "", "", flat});
      for (const char* dtype : {"float32", "bfloat16", "float16", "int32"})
        add({Atom::kName, regime, Consume::kReduce, "sum", dtype, flat, 0});
    }
  return every;
}

const bool listed = list_atom({Atom::kName, Atom::kLeast, &find, &all});

}  // namespace purlin::PURLIN_KERNELS
