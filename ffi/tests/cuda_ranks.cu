// SNAC with virtual ranks on one GPU: the jobs of the host's stress, every value checked.
//
//   cuda_ranks RANKS BLOCKS THREADS CALLS
//
// All ranks share one cooperative launch, since they wait for each other. Their blocks are delayed
// at random, and the packets start as garbage, which no flag may match.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "atom/generic.cuh"
#include "snac/cuda_block.cuh"
#include "snac/kernels.h"
#include "tests/stress_job.h"

namespace purlin {
namespace {

constexpr int64_t kCapacity = 8192;        // packets
constexpr int64_t kStagingHalf = 1 << 19;  // bytes

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

template <class Consumer>
__global__ void run_ranks(Regime regime, bool flat, const CudaCall* calls, const Watch* watches,
                          int blocks, uint32_t seed) {
  __shared__ CudaShared shared;
  const int rank = blockIdx.x / blocks;
  const uint32_t random = (seed * 2654435761u + blockIdx.x * 40503u) * 2246822519u;
  if (random % 4 == 0) __nanosleep(random % 50000);
  CudaBlock<CudaPacket> block(shared, calls[rank], watches[rank], blockIdx.x % blocks, blocks);
  run_waiting<GenericAtom>(block, regime, flat, calls[rank], Consumer());
}

class Ranks {
 public:
  Ranks(int world, int blocks, int threads)
      : world_(world), blocks_(blocks), threads_(threads), bytes_(world * kMaxItems * 8) {
    calls_ = device<CudaCall>(world);
    watches_ = device<Watch>(world);
    Limits limits{20'000'000'000, 10'000'000'000};
    auto* device_limits = device<Limits>(1);
    CHECK(cudaMemcpy(device_limits, &limits, sizeof limits, cudaMemcpyHostToDevice));
    auto* counter = device<uint64_t>(1);
    Report* report = nullptr;
    CHECK(cudaHostAlloc(&report, sizeof(Report), cudaHostAllocMapped));
    std::vector<Watch> watches(world, Watch{report, device_limits, counter, 0});
    CHECK(cudaMemcpy(watches_, watches.data(), world * sizeof(Watch), cudaMemcpyHostToDevice));
    for (int r = 0; r < kNumPartitions * world; ++r) {
      const int64_t bytes = Window<CudaPacket>::bytes(world, kCapacity, kStagingHalf);
      windows_.push_back({device<char>(bytes, 0xA5)});
      CHECK(cudaMemset(windows_[r].base, 0, sizeof(Control)));
    }
    for (int r = 0; r < world; ++r) {
      for (int o = 0; o < kMaxOperands; ++o) {
        input_.push_back(device<char>(bytes_));
        output_.push_back(device<char>(bytes_));
      }
    }
  }

  int64_t run(int n) {
    const Job job = choose(n, world_, blocks_);
    const int blocks = job.blocks;
    std::vector<CudaCall> calls(world_);
    std::vector<std::vector<int>> ids(world_);
    std::vector<char> host(bytes_);
    int64_t packets = 0;
    for (int r = 0; r < world_; ++r) {
      CudaCall& call = calls[r];
      const int group = job.group(r, world_);
      call.rank = job.rank(r, world_);
      call.world = job.world;
      call.operands = job.operands;
      call.tag = n % 7 + 1;
      call.packet_capacity = kCapacity;
      call.staging_half = kStagingHalf;
      call.staging_used = job.staging > 0 ? job.staging : kStagingHalf;
      for (int q = 0; q < job.world; ++q) {
        ids[r].push_back(job.member(group, q, world_));
        call.window[q] = windows_[static_cast<int>(job.partition) * world_ + ids[r][q]];
      }
      packets = 0;
      for (int o = 0; o < job.operands; ++o) {
        char* in = input_[r * kMaxOperands + o];
        char* out = job.in_place ? in : output_[r * kMaxOperands + o];
        fill_input(job, n, o, r, host.data());
        CHECK(cudaMemcpy(in, host.data(), items_of(job.shape[o].local) * item_bytes(job),
                         cudaMemcpyHostToDevice));
        if (!job.in_place) CHECK(cudaMemset(out, 0x55, bytes_));
        call.operand[o] = {in, out,
                           derive(kCollectives[job.row], job.shape[o].local, item_bytes(job),
                                  job.world, job.shape[o].axes)};
        packets += packets_of(call.operand[o].plan);
      }
    }
    CHECK(cudaMemcpy(calls_, calls.data(), world_ * sizeof(CudaCall), cudaMemcpyHostToDevice));
    // Some flat calls take the general way too.
    bool flat = n % 4 != 0;
    for (const CudaCall& call : calls) flat = flat && is_flat(call);
    const bool too_many = job.regime == Regime::kPacket && packets > kCapacity;
    Regime regime = too_many ? Regime::kStaged : job.regime;
    with_consumer<GenericAtom>(kCollectives[job.row], "sum", job.dtype(), [&](auto c) {
      uint32_t seed = n;
      void* args[] = {&regime, &flat, &calls_, &watches_, const_cast<int*>(&blocks), &seed};
      CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(&run_ranks<decltype(c)>),
                                        dim3(world_ * blocks), dim3(threads_), args, 0, nullptr));
    });
    CHECK(cudaDeviceSynchronize());
    int64_t wrong = 0;
    for (int r = 0; r < world_; ++r)
      for (int o = 0; o < job.operands; ++o) {
        CHECK(cudaMemcpy(host.data(), (job.in_place ? input_ : output_)[r * kMaxOperands + o],
                         bytes_, cudaMemcpyDeviceToHost));
        wrong += count_wrong(job, n, o, job.rank(r, world_), ids[r], host.data());
      }
    return wrong;
  }

 private:
  const int world_, blocks_, threads_;
  const int64_t bytes_;
  CudaCall* calls_;
  Watch* watches_;
  std::vector<Window<CudaPacket>> windows_;
  std::vector<char*> input_, output_;
};

}  // namespace
}  // namespace purlin

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s RANKS BLOCKS THREADS CALLS\n", argv[0]);
    return 2;
  }
  const int world = std::atoi(argv[1]), blocks = std::atoi(argv[2]);
  const int threads = std::atoi(argv[3]), calls = std::atoi(argv[4]);
  purlin::Ranks ranks(world, blocks, threads);
  int64_t wrong = 0;
  for (int n = 0; n < calls; ++n) wrong += ranks.run(n);
  std::printf("%d virtual ranks, %d blocks, %d threads, %d calls: %ld wrong values\n", world,
              blocks, threads, calls, static_cast<long>(wrong));
  return wrong == 0 ? 0 : 1;
}
