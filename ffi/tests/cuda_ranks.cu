// SNAC with virtual ranks on one GPU: the jobs of the host's stress, every value checked.
//
//   cuda_ranks ATOM RANKS BLOCKS THREADS CALLS
//
// Each rank launches the kernels of the product on a stream of its own, after a random delay. All
// grids together must fit the GPU, since they wait for each other. What is not control words in a
// window starts as garbage, which no flag may match.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "snac/kernels.h"
#include "snac/refuse.h"
#include "tests/stress_job.h"

namespace purlin {
namespace {

constexpr Capacity kCapacity = {8192, 1024, 1 << 19};
constexpr int64_t kCountBytes = RowCounts::kArrays * kMaxRanks * 8;

void check(cudaError_t error, int line) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "line %d: %s\n", line, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, __LINE__)

template <class T>
T* device(size_t count, int fill = 0) {
  T* at = nullptr;
  CHECK(cudaMalloc(&at, count * sizeof(T)));
  CHECK(cudaMemset(at, fill, count * sizeof(T)));
  return at;
}

__global__ void sleep(uint32_t ns) { __nanosleep(ns); }

class Ranks {
 public:
  Ranks(std::string atom, int world, int blocks, int threads)
      : atom_(std::move(atom)),
        world_(world),
        blocks_(blocks),
        threads_(threads),
        bytes_(world * kMaxItems * 8) {
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    for (const Kernel& kernel : all_kernels(properties.major * 10 + properties.minor))
      if (kernel.scratch_bytes != nullptr && kernel.scratch_bytes(0) > 0)
        CHECK(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kernel.scratch_bytes(0)));
    Limits limits{20'000'000'000, 10'000'000'000};
    auto* device_limits = device<Limits>(1);
    CHECK(cudaMemcpy(device_limits, &limits, sizeof limits, cudaMemcpyHostToDevice));
    auto* counter = device<uint64_t>(1);
    Report* report = nullptr;
    CHECK(cudaHostAlloc(&report, sizeof(Report), cudaHostAllocMapped));
    watch_ = {report, device_limits, counter, 0};
    for (int r = 0; r < kNumPartitions * world; ++r) {
      const int64_t bytes = Window<CudaPacket>::bytes(world, kCapacity);
      windows_.push_back({device<char>(bytes, 0xA5)});
      CHECK(cudaMemset(windows_[r].base, 0, sizeof(Control)));
    }
    for (int r = 0; r < world; ++r) {
      counts_.push_back(device<char>(kCountBytes));
      CHECK(cudaStreamCreateWithFlags(&streams_.emplace_back(), cudaStreamNonBlocking));
      for (int o = 0; o < kMaxOperands; ++o) {
        input_.push_back(device<char>(bytes_));
        output_.push_back(device<char>(bytes_));
      }
    }
  }

  int64_t run(int n) {
    const Job job = choose(n, world_, blocks_, true);
    std::vector<CudaCall> calls(world_);
    std::vector<std::vector<int>> ids(world_);
    std::vector<char> host(bytes_);
    for (int r = 0; r < world_; ++r) {
      CudaCall& call = calls[r];
      const int group = job.group(r, world_);
      call.rank = job.rank(r, world_);
      call.world = job.world;
      call.operands = job.operands;
      call.tag = n % 7 + 1;
      call.capacity = kCapacity;
      call.packet_bytes = job.packet_bytes;
      call.staging_used = job.staging > 0 ? job.staging : kCapacity.staging_half;
      call.depth = n % 9;
      call.item_bytes = static_cast<int>(item_bytes(job));
      for (int q = 0; q < job.world; ++q) {
        ids[r].push_back(job.member(group, q, world_));
        call.window[q] = windows_[static_cast<int>(job.partition) * world_ + ids[r][q]];
      }
      for (int o = 0; o < job.operands; ++o) {
        char* in = input_[r * kMaxOperands + o];
        char* out = job.in_place ? in : output_[r * kMaxOperands + o];
        fill_input(job, n, o, r, host.data());
        CHECK(cudaMemcpy(in, host.data(), items_of(job.shape[o].local) * item_bytes(job),
                         cudaMemcpyHostToDevice));
        if (!job.in_place) CHECK(cudaMemset(out, kUntouched, bytes_));
        call.operand[o] = operand_of(job, o, in, out);
      }
      if (job.collective().counted) {
        job.counts.write(call.rank, job.world, host.data());
        CHECK(cudaMemcpy(counts_[r], host.data(), kCountBytes, cudaMemcpyHostToDevice));
        call.counted = job.counts.counted(job.collective(), job.world, counts_[r]);
      }
    }
    CHECK(cudaDeviceSynchronize());
    // Some flat calls take the general way too.
    bool flat = n % 4 != 0;
    for (const CudaCall& call : calls) flat = flat && is_flat(call);
    Regime regime = job.regime;
    if (!refuse<CudaForms>(calls[0], regime, job.blocks).empty()) regime = Regime::kZeroStaging;
    const Kernel kernel = find_kernel({atom_, regime, job.collective().consume, "sum", job.dtype(),
                                       job.collective().counted, flat});
    if (kernel.function == nullptr) {
      std::fprintf(stderr, "no kernel for regime %s\n", kRegimeNames[static_cast<int>(regime)]);
      std::exit(1);
    }
    for (int r = 0; r < world_; ++r) {
      const uint32_t random = (n * 2654435761u + r * 40503u) * 2246822519u;
      if (random % 4 == 0) sleep<<<1, 1, 0, streams_[r]>>>(random % 50000);
      CHECK(launch(kernel, calls[r], watch_, job.blocks, threads_, streams_[r]));
    }
    CHECK(cudaDeviceSynchronize());
    int64_t wrong = 0;
    for (int r = 0; r < world_; ++r)
      for (int o = 0; o < job.operands; ++o) {
        CHECK(cudaMemcpy(host.data(), (job.in_place ? input_ : output_)[r * kMaxOperands + o],
                         bytes_, cudaMemcpyDeviceToHost));
        wrong += count_wrong(job, n, o, job.rank(r, world_), ids[r], host.data());
      }
    for (int r = 0; r < world_ && job.collective().counted; ++r) {
      CHECK(cudaMemcpy(host.data(), counts_[r], kCountBytes, cudaMemcpyDeviceToHost));
      wrong += job.counts.wrong(job.rank(r, world_), job.world, host.data());
    }
    return wrong;
  }

 private:
  const std::string atom_;
  const int world_, blocks_, threads_;
  const int64_t bytes_;
  Watch watch_;
  std::vector<Window<CudaPacket>> windows_;
  std::vector<cudaStream_t> streams_;
  std::vector<char*> input_, output_, counts_;
};

}  // namespace
}  // namespace purlin

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: %s ATOM RANKS BLOCKS THREADS CALLS\n", argv[0]);
    return 2;
  }
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // so that no stream waits for another
  const int world = std::atoi(argv[2]), blocks = std::atoi(argv[3]);
  const int threads = std::atoi(argv[4]), calls = std::atoi(argv[5]);
  purlin::Ranks ranks(argv[1], world, blocks, threads);
  int64_t wrong = 0;
  for (int n = 0; n < calls; ++n) wrong += ranks.run(n);
  std::printf("%s, %d virtual ranks, %d blocks, %d threads, %d calls: %ld wrong values\n", argv[1],
              world, blocks, threads, calls, static_cast<long>(wrong));
  return wrong == 0 ? 0 : 1;
}
