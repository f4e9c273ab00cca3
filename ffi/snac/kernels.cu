// Instances of SNAC for CUDA: a kernel is a regime, a consumer and an Atom.
#include "atom/generic.cuh"
#include "snac/cuda_block.cuh"
#include "snac/kernels.h"

namespace purlin {
namespace {

template <class Atom, Regime regime, class Consumer>
__global__ void __launch_bounds__(kMaxThreads)
    run(const __grid_constant__ CudaCall call, const __grid_constant__ Watch watch) {
  __shared__ CudaShared shared;
  CudaBlock<CudaPacket> block(shared, call, watch);
  if constexpr (regime == Regime::kPacket)
    packet<Atom, Consumer>(block, call);
  else
    zero_staging<Atom, Consumer>(block, call);
  if (block.index() == 0 && block.thread() == 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(watch.calls), 1ull);
}

// Calls f(device function) for the kernel of a regime; nothing for regimes of the host.
template <class Atom, class Consumer, class F>
void with_regime(Regime regime, F f) {
  if (regime == Regime::kPacket)
    f(reinterpret_cast<const void*>(&run<Atom, Regime::kPacket, Consumer>));
  if (regime == Regime::kZeroStaging)
    f(reinterpret_cast<const void*>(&run<Atom, Regime::kZeroStaging, Consumer>));
}

}  // namespace

const void* find_kernel(std::string_view atom, Regime regime, const Collective& row,
                        std::string_view op, std::string_view dtype) {
  const void* found = nullptr;
  if (atom == GenericAtom::kName)
    with_consumer<GenericAtom>(row, op, dtype, [&](auto consumer) {
      with_regime<GenericAtom, decltype(consumer)>(regime, [&](const void* f) { found = f; });
    });
  return found;
}

std::vector<const void*> all_kernels() {
  std::vector<const void*> all;
  auto add = [&](const Collective& row, const char* op, const char* dtype) {
    for (Regime regime : {Regime::kPacket, Regime::kZeroStaging})
      if (const void* kernel = find_kernel(GenericAtom::kName, regime, row, op, dtype))
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

int64_t packets_of(const Plan& plan) { return Words<GenericAtom::Word, char>::count(plan); }

}  // namespace purlin
