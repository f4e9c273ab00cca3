// Times the CUDA kernels alone: graphs of dependent calls on every GPU, launched together.
//
//   kernel_time OP REGIME ATOM DEPTH BLOCKS THREADS BYTES...
//
// Prints one line for each size: microseconds a call, median and extremes of the samples. BYTES is
// the input of each rank. The buffers hold random numbers, and results are checked against the host
// before anything is timed.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "domain/peer/domain.h"
#include "layout/derive.h"
#include "snac/kernels.h"
#include "snac/refuse.h"

namespace purlin {
namespace {

constexpr int kCallsPerGraph = 200;
constexpr int kSamples = 21;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

struct Rank {
  cudaStream_t stream;
  float *src, *dst;
  CudaCall call;
  Watch watch;
  cudaGraphExec_t graph;
};

class Bench {
 public:
  Bench(const std::string& op, const std::string& regime, const std::string& atom, int depth,
        int blocks, int threads, int64_t bytes)
      : row_(find_collective(op)),
        regime_(find_regime(regime)),
        atom_(atom),
        depth_(depth),
        blocks_(blocks),
        threads_(threads) {
    auto& domain = peer::Domain::start();
    world_ = static_cast<int>(domain.devices().size());
    items_ = bytes / 4 / world_ * world_;
    result_items_ = result_shape(kCollectives[row_], {items_}, world_, {0, 0})[0];
    kernel_ = find_kernel(
        {atom_, static_cast<Regime>(regime_), kCollectives[row_].consume, "sum", "float32", true});
    if (kernel_.function == nullptr) {
      std::fprintf(stderr, "no kernel for %s in regime %s by Atom %s\n", op.c_str(), regime.c_str(),
                   atom.c_str());
      std::exit(2);
    }
    std::vector<int> ordinals;
    std::vector<int64_t> partition;
    for (int r = 0; r < world_; ++r) ordinals.push_back(r), partition.push_back(r);
    std::mt19937 random(0);
    for (int r = 0; r < world_; ++r) {
      Rank rank;
      check(cudaSetDevice(r));
      check(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
      check(cudaMalloc(&rank.src, items_ * 4));
      check(cudaMalloc(&rank.dst, result_items_ * 4));
      std::vector<float> values(items_);
      for (float& v : values) v = static_cast<float>(random() % 1000);
      check(cudaMemcpy(rank.src, values.data(), items_ * 4, cudaMemcpyHostToDevice));
      input_.push_back(values);
      rank.call.rank = r;
      rank.call.world = world_;
      rank.call.operands = 1;
      rank.call.operand[0] = {reinterpret_cast<char*>(rank.src), reinterpret_cast<char*>(rank.dst),
                              derive(kCollectives[row_], {items_}, 4, world_, {0, 0})};
      domain.attach(partition, world_, ordinals, rank.call);
      rank.call.staging_used = rank.call.capacity.staging_half;
      rank.call.depth = depth_;
      const peer::Device& device = domain.device(r);
      rank.watch = {device.device_report, device.limits, device.calls, row_};
      ranks_.push_back(rank);
    }
    domain.set_limits(10, 20);
    const std::string why =
        refuse<CudaForms>(ranks_[0].call, static_cast<Regime>(regime_), blocks_);
    if (!why.empty()) {
      std::fprintf(stderr, "%s\n", why.c_str());
      std::exit(2);
    }
  }

  ~Bench() {
    for (int r = 0; r < world_; ++r) {
      cudaSetDevice(r);
      cudaFree(ranks_[r].src);
      cudaFree(ranks_[r].dst);
      cudaGraphExecDestroy(ranks_[r].graph);
      cudaStreamDestroy(ranks_[r].stream);
    }
  }

  void run() {
    for (int r = 0; r < world_; ++r) capture(r);
    replay();
    verify();
    std::vector<double> us;
    for (int i = 0; i < kSamples; ++i) us.push_back(replay());
    std::sort(us.begin(), us.end());
    std::printf("%-14s %-21s %-9s %d %3d x %4d %12ld bytes %9.2f us (%.2f to %.2f) %8.1f GB/s\n",
                std::string(kCollectives[row_].name).c_str(), kRegimeNames[regime_], atom_.c_str(),
                depth_, blocks_, threads_, static_cast<long>(items_ * 4), us[kSamples / 2],
                us.front(), us.back(), items_ * 4 / us[kSamples / 2] / 1e3);
  }

 private:
  void capture(int r) {
    Rank& rank = ranks_[r];
    cudaGraph_t graph;
    check(cudaSetDevice(r));
    check(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kCallsPerGraph; ++i)
      check(launch(kernel_, rank.call, rank.watch, blocks_, threads_, rank.stream));
    check(cudaStreamEndCapture(rank.stream, &graph));
    check(cudaGraphInstantiate(&rank.graph, graph, 0));
    check(cudaGraphDestroy(graph));
  }

  // Microseconds a call on rank 0, whose graph starts last.
  double replay() {
    cudaEvent_t begin, end;
    for (int r = world_ - 1; r > 0; --r) {
      check(cudaSetDevice(r));
      check(cudaGraphLaunch(ranks_[r].graph, ranks_[r].stream));
    }
    check(cudaSetDevice(0));
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
    check(cudaEventRecord(begin, ranks_[0].stream));
    check(cudaGraphLaunch(ranks_[0].graph, ranks_[0].stream));
    check(cudaEventRecord(end, ranks_[0].stream));
    for (int r = 0; r < world_; ++r) {
      check(cudaSetDevice(r));
      check(cudaStreamSynchronize(ranks_[r].stream));
    }
    float ms = 0;
    check(cudaSetDevice(0));
    check(cudaEventElapsedTime(&ms, begin, end));
    check(cudaEventDestroy(begin));
    check(cudaEventDestroy(end));
    return ms * 1e3 / kCallsPerGraph;
  }

  void verify() {
    const Collective& row = kCollectives[row_];
    const int64_t block =
        row.splits_input() ? items_ / world_ : items_;  // from one rank to another
    for (int r = 0; r < world_; ++r) {
      const int64_t own = row.splits_input() ? r * block : 0;
      std::vector<float> out(result_items_);
      check(cudaMemcpy(out.data(), ranks_[r].dst, result_items_ * 4, cudaMemcpyDeviceToHost));
      for (int64_t i = 0; i < result_items_; ++i) {
        float expected = 0;
        for (int q = 0; q < world_; ++q)
          if (row.consume == Consume::kReduce || i / block == q)
            expected += input_[q][own + i % block];
        if (out[i] == expected) continue;
        std::fprintf(stderr, "rank %d [%ld] is %g, expected %g\n", r, static_cast<long>(i), out[i],
                     expected);
        std::exit(1);
      }
    }
  }

  const int row_, regime_;
  const std::string atom_;
  const int depth_, blocks_, threads_;
  int world_;
  int64_t items_, result_items_;  // of one rank
  Kernel kernel_;
  std::vector<Rank> ranks_;
  std::vector<std::vector<float>> input_;
};

}  // namespace
}  // namespace purlin

int main(int argc, char** argv) {
  if (argc < 8) {
    std::fprintf(stderr, "usage: %s OP REGIME ATOM DEPTH BLOCKS THREADS BYTES...\n", argv[0]);
    return 2;
  }
  for (int i = 7; i < argc; ++i) {
    purlin::Bench bench(argv[1], argv[2], argv[3], std::atoi(argv[4]), std::atoi(argv[5]),
                        std::atoi(argv[6]), std::atoll(argv[i]));
    bench.run();
  }
  return 0;
}
