// The CUDA kernels: one for each Atom, regime, and consumer; looked up by name, launched by
// address.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "atom/pair.h"
#include "layout/collectives.h"
#include "snac/call.h"
#include "snac/regimes.h"
#include "snac/watch.h"

namespace purlin {

using CudaPacket = Pair;
using CudaCall = Call<CudaPacket>;
inline constexpr int kMaxThreads = 512;

// Device function of a kernel, or null if there is none. `flat` calls have a shorter one.
const void* find_kernel(std::string_view atom, Regime regime, const Collective& row,
                        std::string_view op, std::string_view dtype, bool flat = false);

// Whether every operand is contiguous and aligned on both sides.
bool is_flat(const CudaCall& call);

// Every kernel of the binary, for loading them at the start of a domain.
std::vector<const void*> all_kernels();

cudaError_t launch(const void* kernel, const CudaCall& call, const Watch& watch, int blocks,
                   int threads, cudaStream_t stream);

// 64-bit words of a box: what the packet regime counts.
inline int64_t packets_of(const Plan& plan) { return words_of<uint64_t>(plan); }

}  // namespace purlin
