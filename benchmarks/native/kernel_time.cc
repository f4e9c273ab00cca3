// Times the CUDA kernels alone: graphs of dependent calls on every GPU, launched together.
//
//   kernel_time [--rows] [--samples N] [--most BYTES] OP REGIME ATOM DEPTH BLOCKS THREADS BYTES...
//   kernel_time [...] < file, or a pipe, with such lines of one BYTES each
//   kernel_time --about
//
// Prints one line for each: microseconds a call, median and extremes of the samples; with --rows a
// JSON object, also for what there is no kernel for. BLOCKS and THREADS of 0 are what a call in a
// program would take. Results are checked before anything is timed.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "domain/peer/domain.h"
#include "graphs.h"
#include "layout/derive.h"
#include "rows.h"
#include "snac/kernels.h"
#include "snac/refuse.h"

namespace purlin::bench {
namespace {

constexpr const char* kUsage =
    "usage: kernel_time [--rows] [--samples N] [--most BYTES] "
    "[OP REGIME ATOM DEPTH BLOCKS THREADS BYTES...], or such lines on standard input; "
    "kernel_time --about";

struct Rank {
  cudaStream_t stream;
  float *src, *dst;
  CudaCall call;
  Watch watch;
  std::unique_ptr<Graph> graph;
};

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        domain_(peer::Domain::start()),
        world_(static_cast<int>(domain_.devices().size())) {
    domain_.set_limits(10, 20);
    peer::Group group;
    group.world = world_;
    for (int r = 0; r < world_; ++r) group.partition.push_back(r);
    for (int r = 0; r < world_; ++r) {
      Rank& rank = ranks_.emplace_back();
      check(cudaSetDevice(r));
      check(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
      check(cudaMalloc(&rank.src, options.most));
      check(cudaMalloc(&rank.dst, options.most));
      fill(rank.src, r, options.most / 4);
      rank.call.rank = r;
      rank.call.world = world_;
      rank.call.operands = 1;
      domain_.attach(group, rank.call);
      rank.call.staging_used = rank.call.capacity.staging_half;
    }
  }

  void run(const std::vector<std::string>& words) {
    const int64_t bytes = std::atoll(words[6].c_str());
    if (bytes > options_.most) stop(words[6] + " bytes are more than --most", 2);
    const Cell cell(row_of(words[0]), bytes, world_);
    const int found = find_regime(words[1]);
    if (found < 0) stop("there is no regime " + words[1], 2);
    const auto regime = static_cast<Regime>(found);
    Label label{"purlin", "", words[1], words[2]};
    label.depth = std::atoi(words[3].c_str());
    label.blocks = std::atoi(words[4].c_str());
    label.threads = std::atoi(words[5].c_str());
    if (label.blocks == 0) label.blocks = kMaxBlocks / 2;
    if (label.threads == 0) label.threads = kMaxThreads;
    prepare(cell, regime, label.depth);

    const Kernel kernel = find_kernel({label.atom, regime, cell.collective().consume, "sum",
                                       "float32", false, is_flat(ranks_[0].call)});
    std::string why = refuse<CudaForms>(ranks_[0].call, regime, label.blocks);
    if (kernel.function == nullptr || !fits(regime, cell.collective()))
      why = "no kernel for " + words[0] + " in regime " + words[1] + " by Atom " + words[2];
    if (!why.empty()) {
      if (!options_.rows) stop(why, 2);
      return print_row(cell, label, R"("refused": ")" + why + '"');
    }
    for (int r = 0; r < world_; ++r) capture(r, cell, kernel, label);
    replay();
    for (int r = 0; r < world_; ++r) verify(ranks_[r].dst, cell, r);
    std::vector<double> us;
    for (int i = 0; i < options_.samples; ++i) us.push_back(replay());
    print(cell, label, us, options_.rows);
    for (Rank& rank : ranks_) rank.graph.reset();
  }

  void about() const {
    const peer::Device& device = domain_.devices().front();
    std::printf(R"({"arch": "sm_%d", "devices": %d, "device_kind": "%s"})"
                "\n",
                device.capability, world_, device.name.c_str());
  }

 private:
  void prepare(const Cell& cell, Regime regime, int depth) {
    for (int r = 0; r < world_; ++r) {
      Rank& rank = ranks_[r];
      rank.call.operand[0] = {reinterpret_cast<char*>(rank.src), reinterpret_cast<char*>(rank.dst),
                              derive(cell.collective(), {cell.items}, 4, world_, {0, 0})};
      rank.call.depth = depth;
      rank.call.item_bytes = 4;
      const peer::Device& device = domain_.device(r);
      rank.watch = {device.device_report, device.limits,
                    device.calls + cell.row * kNumRegimes + static_cast<int>(regime), cell.row, 0};
    }
  }

  void capture(int r, const Cell& cell, const Kernel& kernel, const Label& label) {
    Rank& rank = ranks_[r];
    check(cudaSetDevice(r));
    spoil(rank.dst, cell, rank.stream);
    rank.graph = std::make_unique<Graph>(rank.stream, calls_per_graph(cell.bytes()), [&] {
      check(launch(kernel, rank.call, rank.watch, label.blocks, label.threads, rank.stream));
    });
  }

  // Microseconds a call on rank 0, whose graph starts last.
  double replay() {
    for (int r = world_ - 1; r > 0; --r) {
      check(cudaSetDevice(r));
      ranks_[r].graph->launch();
    }
    check(cudaSetDevice(0));
    ranks_[0].graph->launch_timed();
    for (int r = 0; r < world_; ++r) {
      check(cudaSetDevice(r));
      check(cudaStreamSynchronize(ranks_[r].stream));
    }
    check(cudaSetDevice(0));
    return ranks_[0].graph->us();
  }

  const Options options_;
  peer::Domain& domain_;
  const int world_;
  std::vector<Rank> ranks_;
};

}  // namespace
}  // namespace purlin::bench

int main(int argc, char** argv) {
  using namespace purlin::bench;
  const Options options(argc, argv);
  Jobs jobs(options.rest, 7, kUsage);
  try {
    Options wanted = options;
    if (options.about) wanted.most = 0;
    Bench bench(wanted);
    if (options.about) {
      bench.about();
      return 0;
    }
    for (auto words = jobs.next(); !words.empty(); words = jobs.next()) bench.run(words);
  } catch (const std::exception& error) {
    stop(error.what());
  }
  return 0;
}
