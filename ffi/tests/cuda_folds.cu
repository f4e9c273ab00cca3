// Every reduction of every type on the GPU against the host's, bit for bit, on random bits.
//
//   cuda_folds ITEMS
//
// The host's folds are proved against numpy in Python.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "atom/generic.cuh"
#include "snac/any_reduce.cuh"
#include "snac/host_reduce.h"
#include "tests/same_values.h"

namespace purlin {
namespace {

constexpr int kWorld = 3;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

struct Threads {
  __device__ int thread() const { return threadIdx.x; }
  __device__ int threads() const { return blockDim.x; }
};

struct Inputs {
  const char* of[kWorld];
};

__global__ void fold_on_device(const __grid_constant__ Call<Pair> call, Inputs inputs, Range part) {
  Threads block;
  AnyReduce<GenericAtom>().pull(block, call, call.operand[0], inputs.of, part);
}

class Folds {
 public:
  explicit Folds(int64_t items) : items_(items), bytes_(items * 16) {
    for (int q = 0; q < kWorld; ++q) {
      check(cudaMalloc(&input_[q], bytes_));
      host_[q].resize(bytes_);
    }
    check(cudaMalloc(&output_, bytes_));
  }

  int64_t run(const char* op, const char* dtype, int64_t item_bytes) {
    std::mt19937_64 random(1);
    const bool truth = std::string(dtype) == "bool";
    const char* from[kWorld];
    for (int q = 0; q < kWorld; ++q) {
      for (char& c : host_[q]) c = static_cast<char>(truth ? random() & 1 : random());
      check(cudaMemcpy(input_[q], host_[q].data(), bytes_, cudaMemcpyHostToDevice));
      from[q] = host_[q].data();
    }
    const HostFold fold = find_fold(op, dtype);
    std::vector<char> expected(bytes_), result(bytes_);
    fold.fold(expected.data(), from, kWorld, 0, items_);
    Call<Pair> call;
    call.world = kWorld;
    call.fold = find_fold_number(op, dtype);
    call.item_bytes = static_cast<int>(item_bytes);
    call.operand[0].dst = output_;
    call.operand[0].plan.run = items_ * item_bytes;
    fold_on_device<<<1, 128>>>(call, {input_[0], input_[1], input_[2]}, {0, items_ * item_bytes});
    check(cudaGetLastError());
    check(cudaMemcpy(result.data(), output_, bytes_, cudaMemcpyDeviceToHost));
    int64_t wrong = -1;
    with_dtype(dtype, [&](auto type) {
      wrong = differing<typename decltype(type)::Item>(result.data(), expected.data(), items_);
    });
    return wrong;
  }

 private:
  const int64_t items_, bytes_;
  char* input_[kWorld];
  char* output_;
  std::vector<char> host_[kWorld];
};

}  // namespace
}  // namespace purlin

int main(int argc, char** argv) {
  using namespace purlin;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s ITEMS\n", argv[0]);
    return 2;
  }
  Folds folds(std::atoll(argv[1]));
  int failed = 0, all = 0;
  for (const char* op : kReduceOps)
    for (const char* dtype : kReduceDtypes) {
      const HostFold fold = find_fold(op, dtype);
      if (fold.fold == nullptr) continue;
      ++all;
      const int64_t wrong = folds.run(op, dtype, fold.item_bytes);
      if (wrong == 0) continue;
      ++failed;
      std::printf("%s of %s: %ld of %s items differ\n", op, dtype, static_cast<long>(wrong),
                  argv[1]);
    }
  std::printf("%d reductions, %d differ\n", all, failed);
  return failed == 0 ? 0 : 1;
}
