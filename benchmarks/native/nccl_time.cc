// Times NCCL as kernel_time does our kernels: graphs of dependent calls, the same sizes and clock.
//
//   nccl_time [--rows] [--samples N] [--most BYTES] [--processes] [--unmixed] OP MODE BYTES...
//   nccl_time [...] < file, or a pipe, with such lines of one BYTES each
//   nccl_time --about
//
// MODE is plain (memory of cudaMalloc) or symmetric (memory of NCCL, registered as windows). Each
// GPU has a thread of its own, with --processes a process; --unmixed tells NCCL that no call comes
// from two graphs at once (NCCL_GRAPH_MIXING_SUPPORT=0). Results are checked before anything is
// timed.
#include <cuda_runtime.h>
#include <nccl.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "graphs.h"
#include "ranks.h"
#include "rows.h"

namespace purlin::bench {
namespace {

constexpr const char* kUsage =
    "usage: nccl_time [--rows] [--samples N] [--most BYTES] [--processes] [--unmixed] "
    "[OP plain|symmetric BYTES...], or such lines on standard input; nccl_time --about";

void check(ncclResult_t result) {
  if (result != ncclSuccess)
    stop(std::string("NCCL: ") + ncclGetErrorString(result) + ": " + ncclGetLastError(nullptr));
}
using bench::check;

// What the ranks share, be they threads or processes.
struct Shared {
  pthread_barrier_t barrier;
  ncclUniqueId id;
  int row;  // of the collective to time; below zero at the end
  bool symmetric;
  int64_t bytes;

  static Shared& make(int world) {
    void* at =
        mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) stop("mmap failed");
    auto* shared = new (at) Shared();
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &attributes, world);
    return *shared;
  }
  void meet() { pthread_barrier_wait(&barrier); }
};

// Where a mode's data lies, on one rank.
struct Buffers {
  float *src = nullptr, *dst = nullptr;
};

class Rank {
 public:
  Rank(Shared& shared, int rank, int world, const Options& options, const std::string& where)
      : shared_(shared), rank_(rank), world_(world), options_(options), where_(where) {
    check(cudaSetDevice(rank));
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    if (rank == 0) check(ncclGetUniqueId(&shared.id));
    shared.meet();
    check(ncclCommInitRank(&comm_, world, shared.id, rank));
    check(cudaMalloc(&plain_.src, options.most));
    check(cudaMalloc(&plain_.dst, options.most));
    fill(plain_.src, rank, options.most / 4);
  }

  void run() {
    Jobs jobs(options_.rest, 3, kUsage);
    while (true) {
      if (rank_ == 0) read(jobs);
      shared_.meet();
      if (shared_.row < 0) return;
      time(Cell(shared_.row, shared_.bytes, world_), shared_.symmetric);
    }
  }

 private:
  void read(Jobs& jobs) {
    const std::vector<std::string> words = jobs.next();
    shared_.row = words.empty() ? -1 : row_of(words[0]);
    if (words.empty()) return;
    if (words[1] != "plain" && words[1] != "symmetric") stop(kUsage, 2);
    shared_.symmetric = words[1] == "symmetric";
    shared_.bytes = std::atoll(words[2].c_str());
    if (shared_.bytes > options_.most) stop(words[2] + " bytes are more than --most", 2);
  }

  void time(const Cell& cell, bool symmetric) {
    if (symmetric && symmetric_.src == nullptr) open_windows();
    const Buffers& at = symmetric ? symmetric_ : plain_;
    auto call = [&] { enqueue(cell, at); };
    call();  // the first call connects, which is not to be captured
    spoil(at.dst, cell, stream_);
    shared_.meet();
    {
      const Graph graph(stream_, calls_per_graph(cell.bytes()), call);
      replay(graph);
      verify(at.dst, cell, rank_);
      shared_.meet();
      std::vector<double> us;
      for (int i = 0; i < options_.samples; ++i) us.push_back(replay(graph));
      const std::string mode = symmetric ? "symmetric" : "plain";
      if (rank_ == 0) print(cell, {"nccl", mode + where_, "", ""}, us, options_.rows);
    }
    shared_.meet();
  }

  // All ranks meet here, since registration is a collective.
  void open_windows() {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    for (float** memory : {&symmetric_.src, &symmetric_.dst}) {
      ncclWindow_t window = nullptr;
      check(ncclMemAlloc(reinterpret_cast<void**>(memory), options_.most));
      check(
          ncclCommWindowRegister(comm_, *memory, options_.most, &window, NCCL_WIN_COLL_SYMMETRIC));
      if (window == nullptr) stop("NCCL registered no symmetric window");
    }
    check(cudaMemcpyAsync(symmetric_.src, plain_.src, options_.most, cudaMemcpyDeviceToDevice,
                          stream_));
    check(cudaStreamSynchronize(stream_));
#else
    stop("symmetric windows need NCCL 2.27 or later");
#endif
  }

  void enqueue(const Cell& cell, const Buffers& at) {
    const int64_t block = cell.items / world_;
    const std::string_view op = cell.collective().name;
    if (op == "all_reduce")
      check(ncclAllReduce(at.src, at.dst, cell.items, ncclFloat32, ncclSum, comm_, stream_));
    else if (op == "all_gather")
      check(ncclAllGather(at.src, at.dst, cell.items, ncclFloat32, comm_, stream_));
    else if (op == "reduce_scatter")
      check(ncclReduceScatter(at.src, at.dst, block, ncclFloat32, ncclSum, comm_, stream_));
    else
      all_to_all(at, block);
  }

  void all_to_all(const Buffers& at, int64_t block) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
    check(ncclAlltoAll(at.src, at.dst, block, ncclFloat32, comm_, stream_));
#else
    check(ncclGroupStart());
    for (int q = 0; q < world_; ++q) {
      check(ncclSend(at.src + q * block, block, ncclFloat32, q, comm_, stream_));
      check(ncclRecv(at.dst + q * block, block, ncclFloat32, q, comm_, stream_));
    }
    check(ncclGroupEnd());
#endif
  }

  // Microseconds a call on rank 0, whose graph starts last; zero on the others.
  double replay(const Graph& graph) {
    if (rank_ != 0) graph.launch();
    shared_.meet();
    if (rank_ == 0) graph.launch_timed();
    check(cudaStreamSynchronize(stream_));
    shared_.meet();
    return rank_ == 0 ? graph.us() : 0;
  }

  Shared& shared_;
  const int rank_, world_;
  const Options& options_;
  const std::string where_;
  cudaStream_t stream_;
  ncclComm_t comm_;
  Buffers plain_, symmetric_;
};

int run(Options options) {
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  bool processes = false, unmixed = false;
  std::erase_if(options.rest, [&](const std::string& word) {
    processes = processes || word == "--processes";
    unmixed = unmixed || word == "--unmixed";
    return word == "--processes" || word == "--unmixed";
  });
  if (options.about) {
    int version = 0;
    check(ncclGetVersion(&version));
    std::printf(R"({"nccl": %d})"
                "\n",
                version);
    return 0;
  }
  if (unmixed) setenv("NCCL_GRAPH_MIXING_SUPPORT", "0", 1);
  const int world = count_devices();
  if (world == 0) stop("there is no GPU");
  Shared& shared = Shared::make(world);
  const std::string where =
      std::string(processes ? " processes" : "") + (unmixed ? " unmixed" : "");
  auto work = [&](int r) { Rank(shared, r, world, options, where).run(); };
  return processes ? in_processes(world, work) : in_threads(world, work);
}

}  // namespace
}  // namespace purlin::bench

int main(int argc, char** argv) {
  const int status = purlin::bench::run(purlin::bench::Options(argc, argv));
  // Communicators and windows end with the process: to take them down takes seconds.
  std::fflush(stdout);
  std::_Exit(status);
}
