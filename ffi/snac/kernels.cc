// Looks up and launches the CUDA kernels of all Atoms.
#include "snac/kernels.h"

#include "layout/folds.h"

namespace purlin {
namespace {

std::vector<AtomKernels>& atoms() {
  static std::vector<AtomKernels> all;
  return all;
}

}  // namespace

bool list_atom(const AtomKernels& kernels) {
  atoms().push_back(kernels);
  return true;
}

const std::vector<AtomKernels>& listed_atoms() { return atoms(); }

Kernel find_kernel(Wanted wanted) {
  if (wanted.consume == Consume::kReduce) wanted.fold = find_fold_number(wanted.op, wanted.dtype);
  Kernel own, generic;
  bool known = false;
  for (const AtomKernels& atom : atoms()) {
    if (atom.name == wanted.atom) own = atom.find(wanted), known = true;
    if (atom.name == "generic") generic = atom.find(wanted);
  }
  return own.function != nullptr || !known ? own : generic;
}

std::vector<Kernel> all_kernels(int capability) {
  std::vector<Kernel> all;
  for (const AtomKernels& atom : atoms())
    if (atom.least <= capability)
      for (const Kernel& kernel : atom.all()) all.push_back(kernel);
  return all;
}

bool is_flat(const CudaCall& call) {
  bool flat = true;
  for (int o = 0; o < call.operands; ++o) {
    const Operand& operand = call.operand[o];
    flat = flat && is_flat<uint64_t>(operand.src, operand.dst, operand.plan);
    // Blocks of any number of rows must begin and end with whole words.
    if (call.counted.sizes != nullptr) flat = flat && operand.row_bytes % sizeof(uint64_t) == 0;
  }
  return flat;
}

cudaError_t launch(const Kernel& kernel, CudaCall call, const Watch& watch, int blocks, int threads,
                   cudaStream_t stream) {
  call.fold = kernel.fold;
  const int scratch = kernel.scratch_bytes != nullptr ? kernel.scratch_bytes(call.depth) : 0;
  void* args[] = {&call, const_cast<Watch*>(&watch)};
  return cudaLaunchKernel(kernel.function, dim3(blocks), dim3(threads), args, scratch, stream);
}

}  // namespace purlin
