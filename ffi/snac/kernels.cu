// Instances of SNAC for CUDA: a kernel is a regime, a consumer and an Atom.
#include "atom/generic.cuh"
#include "snac/cuda_block.cuh"
#include "snac/kernels.h"

namespace purlin {
namespace {

template <class Atom, Regime regime, template <class, class> class View, class Consumer>
__global__ void __launch_bounds__(kMaxThreads)
    run(const __grid_constant__ CudaCall call, const __grid_constant__ Watch watch) {
  __shared__ CudaShared shared;
  CudaBlock<CudaPacket> block(shared, call, watch);
  if constexpr (regime == Regime::kPacket)
    packet<Atom, View, Consumer>(block, call);
  else
    zero_staging<Atom, Consumer>(block, call);
}

// Calls f(device function) for the kernel of a regime; nothing for regimes of the host.
template <class Atom, class Consumer, class F>
void with_regime(Regime regime, bool flat, F f) {
  if (regime == Regime::kPacket && flat)
    f(reinterpret_cast<const void*>(&run<Atom, Regime::kPacket, FlatWords, Consumer>));
  if (regime == Regime::kPacket && !flat)
    f(reinterpret_cast<const void*>(&run<Atom, Regime::kPacket, Words, Consumer>));
  if (regime == Regime::kZeroStaging)
    f(reinterpret_cast<const void*>(&run<Atom, Regime::kZeroStaging, Words, Consumer>));
}

}  // namespace

const void* find_kernel(std::string_view atom, Regime regime, const Collective& row,
                        std::string_view op, std::string_view dtype, bool flat) {
  const void* found = nullptr;
  if (atom == GenericAtom::kName)
    with_consumer<GenericAtom>(row, op, dtype, [&](auto consumer) {
      with_regime<GenericAtom, decltype(consumer)>(regime, flat, [&](const void* f) { found = f; });
    });
  return found;
}

std::vector<const void*> all_kernels() {
  std::vector<const void*> all;
  auto add = [&](const Collective& row, const char* op, const char* dtype) {
    for (Regime regime : {Regime::kPacket, Regime::kZeroStaging})
      for (bool flat : {true, false})
        if (const void* kernel = find_kernel(GenericAtom::kName, regime, row, op, dtype, flat))
          all.push_back(kernel);
  };
  add(kCollectives[find_collective("all_to_all")], "", "");
  const Collective& reduce = kCollectives[find_collective("all_reduce")];
  for (const char* op : kReduceOps)
    for (const char* dtype : kReduceDtypes) add(reduce, op, dtype);
  return all;
}

cudaError_t launch(const void* kernel, const CudaCall& call, const Watch& watch, int blocks,
                   int threads, cudaStream_t stream) {
  void* args[] = {const_cast<CudaCall*>(&call), const_cast<Watch*>(&watch)};
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), args, 0, stream);
}

bool is_flat(const CudaCall& call) {
  bool flat = true;
  for (int o = 0; o < call.operands; ++o) {
    const Operand& operand = call.operand[o];
    flat = flat && is_flat<GenericAtom::Word>(operand.src, operand.dst, operand.plan);
  }
  return flat;
}

}  // namespace purlin
