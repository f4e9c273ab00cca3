// SNAC under real threads: mixed collectives, regimes and sizes back to back, every value checked.
//
//   snac_stress RANKS BLOCKS THREADS CALLS
//
// Built with -fsanitize=thread this is the proof that the protocol orders what it must. Each rank
// overwrites its input as soon as a call has ended, and ranks are delayed at random, so a missing
// rendezvous shows as a wrong value also without the sanitizer. Calls of all ranks and of
// sub-groups alternate, each partition with windows of its own, which change hands now and then.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "atom/cpu.h"
#include "snac/counted.h"
#include "snac/host_block.h"
#include "snac/host_reduce.h"
#include "snac/regimes.h"
#include "tests/stress_job.h"

namespace purlin {
namespace {

// Sometimes falls asleep between sending and reading, so that peers run as far ahead as they may.
struct SleepyAtom : CpuAtom {
  static Packet get_packet(const Packet* at) {
    thread_local std::minstd_rand random(std::hash<std::thread::id>()(std::this_thread::get_id()));
    if (random() % 512 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    return CpuAtom::get_packet(at);
  }
};

using CpuCall = Call<CpuAtom::Packet>;
using CpuWindow = Window<CpuAtom::Packet>;

constexpr Capacity kCapacity = {4096, 0, 1 << 18};
constexpr int kCallsPerOwner = 97;  // then windows change hands

#if defined(__SANITIZE_THREAD__)
constexpr bool kStreams = false;  // the sanitizer sees no order in stores past the caches
#else
constexpr bool kStreams = true;
#endif

struct Rank {
  std::vector<char> input[kMaxOperands], output[kMaxOperands];
  std::vector<char> counts;
  std::unique_ptr<HostShared> gate;  // all threads of the rank, between calls
  std::deque<HostShared> shared;     // one for each block
};

// A window of each rank.
class Windows {
 public:
  explicit Windows(int ranks) : bases_(ranks) {
    const int64_t bytes = CpuWindow::bytes(ranks, kCapacity);
    for (auto& base : bases_) base.reset(new (std::align_val_t(64)) char[bytes]());
  }
  CpuWindow of(int rank) const { return {bases_[rank].get()}; }

  uint64_t last_epoch() const {
    uint64_t last = 0;
    for (const auto& base : bases_)
      for (uint64_t epoch : CpuWindow{base.get()}.control().epoch) last = std::max(last, epoch);
    return last;
  }
  // For an owner whose ranks must agree, after a rendezvous of all ranks. Epochs never go back.
  void set_epochs(uint64_t to) {
    for (const auto& base : bases_)
      for (uint64_t& epoch : CpuWindow{base.get()}.control().epoch) epoch = to;
  }

 private:
  struct Free {
    void operator()(char* at) const { operator delete[](at, std::align_val_t(64)); }
  };
  std::vector<std::unique_ptr<char[], Free>> bases_;
};

class Stress {
 public:
  Stress(int world, int blocks, int threads, int calls)
      : world_(world),
        blocks_(blocks),
        threads_(threads),
        calls_(calls),
        ranks_(world),
        everybody_(world * blocks * threads) {
    for (Rank& rank : ranks_) {
      for (auto& x : rank.input) x.assign(world * kMaxItems * 8, 0);
      for (auto& x : rank.output) x.assign(world * kMaxItems * 8, 0);
      rank.counts.assign(RowCounts::kArrays * kMaxRanks * 8, 0);
      rank.gate = std::make_unique<HostShared>(blocks * threads);
      for (int b = 0; b < blocks; ++b) rank.shared.emplace_back(threads);
    }
    for (int p = 0; p < kNumPartitions; ++p) owned_.push_back(std::make_unique<Windows>(world));
  }

  int64_t run() {
    std::vector<std::thread> all;
    for (int r = 0; r < world_; ++r)
      for (int b = 0; b < blocks_; ++b)
        for (int t = 0; t < threads_; ++t) all.emplace_back([=, this] { work(r, b, t); });
    for (auto& thread : all) thread.join();
    return __atomic_load_n(&wrong_, __ATOMIC_RELAXED);
  }

 private:
  void work(int r, int b, int t) {
    Rank& rank = ranks_[r];
    const bool first = b == 0 && t == 0;
    std::mt19937_64 random(r * 1000 + b * 10 + t);
    for (int n = 0; n < calls_; ++n) {
      if (n % kCallsPerOwner == 0) {
        everybody_.sync();
        if (r == 0 && first) change_hands();
        everybody_.sync();
      }
      const Job job = choose(n, world_, blocks_, CpuAtom::kLines);
      const CpuCall call = make_call(job, n, r);
      if (first) fill(job, n, r);
      rank.gate->sync();
      if (random() % 16 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
      if (b < job.blocks) {
        HostBlock block(rank.shared[b], b, job.blocks, t, threads_);
        block.set_streams(kStreams && n % 2 == 0);
        launch(block, job, call);
      }
      rank.gate->sync();
      if (first) check(job, n, r);
    }
  }

  void change_hands() {
    std::rotate(owned_.begin(), owned_.begin() + 1, owned_.end());
    for (auto& windows : owned_) windows->set_epochs(windows->last_epoch());
  }

  CpuCall make_call(const Job& job, int n, int r) {
    CpuCall call;
    const int group = job.group(r, world_);
    call.rank = job.rank(r, world_);
    call.world = job.world;
    call.operands = job.operands;
    call.tag = n % 7 + 1;
    call.capacity = kCapacity;
    call.packet_bytes = job.packet_bytes;
    call.staging_used = job.staging > 0 ? job.staging : kCapacity.staging_half;
    for (int o = 0; o < job.operands; ++o) {
      Rank& rank = ranks_[r];
      call.operand[o] = operand_of(job, o, rank.input[o].data(), result(job, r, o));
    }
    if (job.collective().counted)
      call.counted = job.counts.counted(job.collective(), job.world, ranks_[r].counts.data());
    const Windows& windows = *owned_[static_cast<int>(job.partition)];
    for (int q = 0; q < job.world; ++q) call.window[q] = windows.of(job.member(group, q, world_));
    return call;
  }

  static void launch(HostBlock& block, const Job& job, const CpuCall& call) {
    int64_t packets = 0;
    for (int o = 0; o < call.operands; ++o)
      packets += words_of<CpuAtom::Word>(call.operand[o].plan);
    bool flat = call.tag % 4 != 0;  // some flat calls take the general way too
    for (int o = 0; o < call.operands; ++o) {
      const Operand& operand = call.operand[o];
      flat = flat && is_flat<CpuAtom::Word>(operand.src, operand.dst, operand.plan);
      if (job.collective().counted) flat = flat && operand.row_bytes % sizeof(CpuAtom::Word) == 0;
    }
    const bool fits = job.regime != Regime::kPacket || packets <= kCapacity.packets;
    const Regime regime = fits ? job.regime : Regime::kStaged;
    with_host_consumer<SleepyAtom>(job.collective(), "sum", job.dtype(), [&](auto consumer) {
      if (job.collective().counted)
        run_waiting_counted<SleepyAtom>(block, regime, flat, call, consumer);
      else
        run_waiting<SleepyAtom>(block, regime, flat, call, consumer);
    });
  }

  void fill(const Job& job, int n, int r) {
    for (int o = 0; o < job.operands; ++o) {
      fill_input(job, n, o, r, ranks_[r].input[o].data());
      std::fill(ranks_[r].output[o].begin(), ranks_[r].output[o].end(), kUntouched);
    }
    job.counts.write(job.rank(r, world_), job.world, ranks_[r].counts.data());
  }

  char* result(const Job& job, int r, int o) {
    return job.in_place ? ranks_[r].input[o].data() : ranks_[r].output[o].data();
  }

  void check(const Job& job, int n, int r) {
    const int group = job.group(r, world_), rank = job.rank(r, world_);
    std::vector<int> ids;
    for (int q = 0; q < job.world; ++q) ids.push_back(job.member(group, q, world_));
    for (int o = 0; o < job.operands; ++o) {
      const int64_t wrong = count_wrong(job, n, o, rank, ids, result(job, r, o));
      __atomic_fetch_add(&wrong_, wrong, __ATOMIC_RELAXED);
    }
    if (job.collective().counted)
      __atomic_fetch_add(&wrong_, job.counts.wrong(rank, job.world, ranks_[r].counts.data()),
                         __ATOMIC_RELAXED);
  }

  const int world_, blocks_, threads_, calls_;
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<Windows>> owned_;  // by partition
  HostShared everybody_;
  int64_t wrong_ = 0;
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
  const int64_t wrong = purlin::Stress(world, blocks, threads, calls).run();
  std::printf("%d ranks, %d blocks, %d threads, %d calls: %ld wrong values\n", world, blocks,
              threads, calls, static_cast<long>(wrong));
  return wrong == 0 ? 0 : 1;
}
