// The CUDA kernels: one for each Atom, regime, and consumer; looked up by name, launched by
// address.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "atom/atom.h"
#include "atom/pair.h"
#include "layout/collectives.h"
#include "snac/call.h"
#include "snac/counted.h"
#include "snac/regimes.h"
#include "snac/watch.h"

namespace purlin {

using CudaPacket = Pair;
using CudaCall = Call<CudaPacket>;

// What a caller looks for.
struct Wanted {
  std::string_view atom;
  Regime regime;
  Consume consume;
  std::string_view op, dtype;  // of reductions
  bool counted = false;
  bool flat = false;  // flat calls have shorter kernels
  int fold = -1;      // of op and dtype; found by find_kernel
};

struct Kernel {
  const void* function = nullptr;  // null: there is none
  int fold = 0;                    // what the call must say, where the kernel asks for it
  int (*scratch_bytes)(int depth) = nullptr;
};

// The kernels of one Atom, from a translation unit of its own.
struct AtomKernels {
  std::string_view name;
  int least = 0;  // compute capability, 90 for 9.0
  Kernel (*find)(const Wanted&) = nullptr;
  std::vector<Kernel> (*all)() = nullptr;
};
bool list_atom(const AtomKernels& kernels);
const std::vector<AtomKernels>& listed_atoms();

// The kernel of an Atom; of the generic one where the Atom has none of its own.
Kernel find_kernel(Wanted wanted);

// Every kernel that a device may run, for loading them at the start of a domain.
std::vector<Kernel> all_kernels(int capability);

// Whether every operand is contiguous and aligned on both sides.
bool is_flat(const CudaCall& call);

cudaError_t launch(const Kernel& kernel, CudaCall call, const Watch& watch, int blocks, int threads,
                   cudaStream_t stream);

}  // namespace purlin
