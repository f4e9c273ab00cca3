// What the programs that time collectives alone share: shapes, values, and graphs of calls.
//
// BYTES is the input of each rank; of an all_gather it is the whole output. What does not divide by
// the world is cut off.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "layout/collectives.h"

namespace purlin::bench {

// Not exit(): other threads may be waiting inside a library, and would be torn down under its feet.
[[noreturn]] inline void stop(const std::string& why, int status = 1) {
  std::fflush(stdout);
  std::fprintf(stderr, "%s\n", why.c_str());
  std::fflush(stderr);
  std::_Exit(status);
}

inline void check(cudaError_t error) {
  if (error != cudaSuccess) stop(std::string("CUDA: ") + cudaGetErrorString(error));
}

// Fewer calls where each takes milliseconds.
inline int calls_per_graph(int64_t bytes) {
  return static_cast<int>(std::clamp<int64_t>((800 << 20) / std::max<int64_t>(bytes, 1), 10, 200));
}

// One collective of one size among `world` ranks.
struct Cell {
  Cell(int row, int64_t bytes, int world) : row(row), world(world) {
    const bool gathers = !collective().splits_input() && collective().splits_output();
    const int64_t block = bytes / 4 / world;
    items = gathers ? block : block * world;
    result_items = gathers || collective().splits_output() == collective().splits_input()
                       ? block * world
                       : block;
    if (block == 0) stop(std::to_string(bytes) + " bytes are too few", 2);
  }

  const Collective& collective() const { return kCollectives[row]; }
  int64_t bytes() const { return 4 * std::max(items, result_items); }

  int row, world;
  int64_t items, result_items;  // of one rank
};

// Whole numbers, so that sums are exact in any order.
inline float value(int rank, int64_t i) {
  const uint32_t mixed = static_cast<uint32_t>(i) * 2654435761u + rank * 747796405u;
  return static_cast<float>(mixed >> 22);
}

constexpr int64_t kChunk = 1 << 22;  // items that the host looks at together

inline void fill(float* device, int rank, int64_t items) {
  std::vector<float> chunk(std::min(items, kChunk));
  for (int64_t at = 0; at < items; at += kChunk) {
    const int64_t n = std::min(kChunk, items - at);
    for (int64_t i = 0; i < n; ++i) chunk[i] = value(rank, at + i);
    check(cudaMemcpy(device + at, chunk.data(), n * 4, cudaMemcpyHostToDevice));
  }
}

// Overwrites a result by what is no number, so that an older one is not taken for it.
inline void spoil(float* result, const Cell& cell, cudaStream_t stream) {
  check(cudaMemsetAsync(result, 0xFF, cell.result_items * 4, stream));
  check(cudaStreamSynchronize(stream));
}

// Ends the program unless the result of `rank` has the values that it should have.
inline void verify(const float* result, const Cell& cell, int rank) {
  const bool reduces = cell.collective().consume == Consume::kReduce;
  // From one rank to another, and where it lies in the input.
  const int64_t block = cell.collective().splits_input() ? cell.items / cell.world : cell.items;
  const int64_t own = cell.collective().splits_input() ? rank * block : 0;
  std::vector<float> chunk(std::min(cell.result_items, kChunk));
  int64_t n = 0;
  for (int64_t at = 0; at < cell.result_items; at += n) {
    n = std::min({kChunk, cell.result_items - at, block - at % block});
    check(cudaMemcpy(chunk.data(), result + at, n * 4, cudaMemcpyDeviceToHost));
    const int64_t from = own + at % block;
    const int first = reduces ? 0 : static_cast<int>(at / block);
    const int last = reduces ? cell.world - 1 : first;
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; ++i) {
      float expected = 0;
      for (int q = first; q <= last; ++q) expected += value(q, from + i);
      wrong += chunk[i] != expected;
    }
    if (wrong > 0)
      stop(std::string(cell.collective().name) + ", " + std::to_string(cell.bytes()) +
           " bytes: rank " + std::to_string(rank) + " has " + std::to_string(wrong) +
           " wrong values from item " + std::to_string(at) + " on");
  }
}

// A rank's graph of calls, one after another, and the clock around it.
class Graph {
 public:
  // The device of `stream` must be current.
  template <class Call>
  Graph(cudaStream_t stream, int calls, const Call& call) : stream_(stream), calls_(calls) {
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) call();
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&exec_, graph, 0));
    check(cudaGraphDestroy(graph));
    check(cudaEventCreate(&begin_));
    check(cudaEventCreate(&end_));
  }
  ~Graph() {
    cudaGraphExecDestroy(exec_);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch() const { check(cudaGraphLaunch(exec_, stream_)); }
  // For rank 0, which starts when all others have been started.
  void launch_timed() const {
    check(cudaEventRecord(begin_, stream_));
    launch();
    check(cudaEventRecord(end_, stream_));
  }
  // Microseconds a call, after the stream has been waited for.
  double us() const {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1e3 / calls_;
  }

 private:
  cudaStream_t stream_;
  const int calls_;
  cudaGraphExec_t exec_;
  cudaEvent_t begin_, end_;
};

}  // namespace purlin::bench
