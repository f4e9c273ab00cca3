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
__global__ void __launch_bounds__(kMaxThreads)
    run_counted(const __grid_constant__ CudaCall call, const __grid_constant__ Watch watch) {
  __shared__ CudaShared shared;
  CudaBlock<CudaPacket> block(shared, call, watch);
  if constexpr (regime == Regime::kPacket) return packet_counted<Atom, View, Consumer>(block, call);
  if constexpr (!is_flagged(regime)) Atom::prepare(block);
  if constexpr (regime == Regime::kStaged) return staged_counted<Atom, Consumer>(block, call);
  if constexpr (regime == Regime::kZeroStaging)
    return zero_staging_counted<Atom, Consumer>(block, call);
}

template <Regime regime, template <class, class> class View, class Consumer>
Kernel counted_kernel() {
  return {reinterpret_cast<const void*>(&run_counted<regime, View, Consumer>), 0,
          is_flagged(regime) ? nullptr : &Atom::scratch_bytes};
}

template <class Consumer>
Kernel find_counted(Regime regime, bool flat) {
  constexpr bool kCopies = std::is_same_v<Consumer, CopyConsumer<Atom>>;
  constexpr bool kAny = std::is_same_v<Consumer, AnyReduce<Atom>>;
  if constexpr (kGeneric && kCopies)
    if (regime == Regime::kPacket && flat)
      return counted_kernel<Regime::kPacket, FlatWords, Consumer>();
  if constexpr (kGeneric && (kCopies || kAny)) {
    if (regime == Regime::kPacket) return counted_kernel<Regime::kPacket, Words, Consumer>();
    if (regime == Regime::kStaged) return counted_kernel<Regime::kStaged, Words, Consumer>();
  }
  if (regime == Regime::kZeroStaging)
    return counted_kernel<Regime::kZeroStaging, Words, Consumer>();
  return {};
}

template <Regime regime, template <class, class> class View, class Consumer>
Kernel kernel() {
  return {reinterpret_cast<const void*>(&run<regime, View, Consumer>), 0,
          is_flagged(regime) ? nullptr : &Atom::scratch_bytes};
}

// Packets, lines and staging are the generic Atom's, for all. The usual consumers have kernels of
// their own for flat calls.
template <class Consumer>
Kernel find(const Wanted& wanted) {
  const auto [regime, flat] = std::pair(wanted.regime, wanted.flat);
  if (wanted.counted) return find_counted<Consumer>(regime, flat);
  constexpr bool kCopies = std::is_same_v<Consumer, CopyConsumer<Atom>>;
  constexpr bool kAny = std::is_same_v<Consumer, AnyReduce<Atom>>;
  if constexpr (kGeneric) {
    if constexpr (!kAny) {
      if (regime == Regime::kPacket && flat) return kernel<Regime::kPacket, FlatWords, Consumer>();
      if (regime == Regime::kLine && flat) return kernel<Regime::kLine, FlatWords, Consumer>();
    }
    if (regime == Regime::kPacket) return kernel<Regime::kPacket, Words, Consumer>();
    if (regime == Regime::kLine) return kernel<Regime::kLine, Words, Consumer>();
    if constexpr (kCopies || kAny)
      if (regime == Regime::kStaged) return kernel<Regime::kStaged, Words, Consumer>();
    if constexpr (kAny)
      if (regime == Regime::kComposed) return kernel<Regime::kComposed, Words, Consumer>();
  }
  if (regime == Regime::kZeroStaging) return kernel<Regime::kZeroStaging, Words, Consumer>();
  if constexpr (kCopies) {
    if (regime == Regime::kZeroStagingPush)
      return kernel<Regime::kZeroStagingPush, Words, Consumer>();
  } else {
    if (regime == Regime::kZeroStagingComposed)
      return kernel<Regime::kZeroStagingComposed, Words, Consumer>();
  }
  return {};
}

// The kernels of the sums that are worth their own; staging is not where they are fast.
Kernel find_usual(const Wanted& wanted) {
  if (wanted.op != "sum") return {};
  if (wanted.dtype == "float32") return find<ReduceConsumer<Atom, float, float, Sum>>(wanted);
  if (wanted.dtype == "bfloat16") return find<ReduceConsumer<Atom, Bfloat16, float, Sum>>(wanted);
  return {};
}

Kernel find(const Wanted& wanted) {
  if (wanted.consume == Consume::kCopy) return find<CopyConsumer<Atom>>(wanted);
  Kernel found = find_usual(wanted);
  if constexpr (kGeneric) {
    const bool wide = wanted.dtype == "complex128";  // a packet's word holds no such item
    if (found.function != nullptr || wanted.fold < 0 || (wide && is_flagged(wanted.regime)))
      return found;
    found = find<AnyReduce<Atom>>(wanted);
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
    for (auto [counted, flat] :
         {std::pair(false, true), {false, false}, {true, true}, {true, false}}) {
      const auto regime = static_cast<Regime>(r);
      add({Atom::kName, regime, Consume::kCopy, "", "", counted, flat});
      for (const char* dtype : {"float32", "bfloat16", "int32"})
        add({Atom::kName, regime, Consume::kReduce, "sum", dtype, counted, flat, 0});
    }
  return every;
}

const bool listed = list_atom({Atom::kName, Atom::kLeast, &find, &all});

}  // namespace purlin::PURLIN_KERNELS
