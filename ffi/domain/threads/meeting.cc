// Runs one collective of virtual CPU devices once all ranks of its group have arrived.
#include "domain/threads/meeting.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>

#include "atom/cpu.h"
#include "domain/threads/pool.h"
#include "domain/threads/room.h"
#include "domain/threads/subnormals.h"
#include "domain/threads/windows.h"
#include "snac/counted.h"
#include "snac/faults.h"
#include "snac/host_block.h"
#include "snac/host_reduce.h"
#include "snac/refuse.h"
#include "snac/regimes.h"

namespace purlin::threads {
namespace {

using CpuCall = Call<CpuAtom::Packet>;
constexpr int64_t kCachedBytes = 16 << 20;     // what a last-level cache keeps, about
constexpr int64_t kBytesPerBlock = 256 << 10;  // a piece of work worth another thread

Windows& windows() {
  static Windows* all = new Windows;
  return *all;
}

GangQueue& gangs() {
  static GangQueue* queue = new GangQueue;
  return *queue;
}

CpuCall call_of(const Meeting& meeting, int rank) {
  CpuCall call;
  call.rank = rank;
  call.world = static_cast<int>(meeting.ranks.size());
  call.operands = static_cast<int>(meeting.plans.size());
  const Arrival& own = meeting.ranks[rank];
  for (int o = 0; o < call.operands; ++o)
    call.operand[o] = {own.src[o], own.dst[o], meeting.plans[o], own.row_bytes[o]};
  call.counted = own.counted;
  return call;
}

// Counts down from a number of tasks; the last one completes every promise, each from a task of its
// own: that runs the rest of the device's program on the thread.
class Countdown {
 public:
  Countdown(std::shared_ptr<Meeting> meeting, int64_t tasks)
      : meeting_(std::move(meeting)), left_(tasks) {}

  void arrive() {
    if (left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    complete(meeting_, "");
  }

 private:
  std::shared_ptr<Meeting> meeting_;
  std::atomic<int64_t> left_;
};

// What a rank reads, on average.
int64_t bytes_of(const Meeting& meeting) {
  const auto ranks = static_cast<int64_t>(meeting.ranks.size());
  int64_t bytes = 0;
  if (meeting.counts.empty()) {
    for (const Plan& plan : meeting.plans) bytes += plan.bytes();
    return bytes * ranks;  // from each rank
  }
  for (size_t o = 0; o < meeting.plans.size(); ++o)
    for (const Counts& counts : meeting.counts)
      for (int64_t q = 0; q < ranks; ++q)
        bytes += counts.receive[q] * meeting.ranks[0].row_bytes[o];
  return (bytes + ranks - 1) / ranks;
}

// The counts of all ranks; what is wrong with them, if anything is.
std::string count(const Site& site, Meeting& meeting) {
  const int world = site.world;
  std::vector<Counts> all(world);
  std::string wrong;
  const auto note = [&](const Finding& found, int rank, int peer) {
    if (found.fault == Fault::kNone || !wrong.empty()) return;
    wrong = "bad counts: " + std::string(site.collective().name) + " at " + site.text + ": " +
            describe(found, rank, peer);
  };
  for (int r = 0; r < world; ++r) {
    const Counted& of = meeting.ranks[r].counted;
    for (int p = 0; p < world; ++p) {
      all[r].send[p] = of.read(of.sizes, p);
      all[r].send_at[p] = of.send_at(p);
      note(of.check_send(all[r], p), r, p);
    }
  }
  for (int r = 0; r < world && wrong.empty(); ++r) {
    const Counted& of = meeting.ranks[r].counted;
    for (int q = 0; q < world; ++q)
      for (int w = 0; w < kCountWords; ++w)
        learn_count(of, all[r], w, q, count_word(meeting.ranks[q].counted, all[q], w, r));
    for (int q = 0; q < world && of.to == nullptr; ++q)
      all[r].receive_at[q] = of.receive_at(all[r], q);
    for (int q = 0; q < world; ++q) {
      note(of.check_receive(all[r], r, q), r, q);
      of.write_received(q, all[r].receive[q]);
    }
  }
  if (wrong.empty()) meeting.counts = std::move(all);
  return wrong;
}

// Whether what all ranks write is more than the caches keep until somebody reads it.
bool is_large(const Site& site, const Meeting& meeting) {
  if (!meeting.counts.empty()) return false;
  const int64_t ranks = static_cast<int64_t>(meeting.ranks.size());
  const int64_t parts = site.collective().splits_output() ? ranks : 1;  // of a result
  int64_t bytes = 0;
  for (const Plan& plan : meeting.plans) bytes += plan.bytes() * parts * ranks;
  return bytes > kCachedBytes;
}

// Where the ranks' blocks for `rank` lie.
struct From {
  const char* address[kMaxOperands][kMaxRanks] = {};
};

From blocks_for(const Meeting& meeting, int rank) {
  From from;
  for (size_t o = 0; o < meeting.plans.size(); ++o)
    for (size_t q = 0; q < meeting.ranks.size(); ++q) {
      const Arrival& peer = meeting.ranks[q];
      const int64_t at = meeting.counts.empty()
                             ? rank * meeting.plans[o].src_step
                             : meeting.counts[q].send_at[rank] * peer.row_bytes[o];
      from.address[o][q] = peer.src[o] + at;
    }
  return from;
}

// The regime without waits: blocks of all ranks are pieces of work for as many threads as pay.
template <class Consumer>
void run_meet(const Site& site, const std::shared_ptr<Meeting>& meeting, Consumer consumer) {
  struct Work {
    std::vector<CpuCall> calls;
    std::vector<From> from;  // of each rank
    char* results[kMaxOperands][kMaxRanks] = {};
    bool once = false, large = false;
    int blocks = 1;
    std::atomic<int64_t> next{0};
    std::unique_ptr<Countdown> countdown;
  };
  auto work = std::make_shared<Work>();
  const int world = static_cast<int>(meeting->ranks.size());
  for (int r = 0; r < world; ++r) {
    work->calls.push_back(call_of(*meeting, r));
    work->from.push_back(blocks_for(*meeting, r));
    for (int o = 0; o < work->calls[r].operands; ++o)
      work->results[o][r] = meeting->ranks[r].dst[o];
  }
  const int64_t by_size = (bytes_of(*meeting) + kBytesPerBlock - 1) / kBytesPerBlock;
  work->blocks =
      site.blocks > 0 ? site.blocks : static_cast<int>(std::clamp<int64_t>(by_size, 1, kMaxBlocks));
  work->once = site.collective().is_uniform();
  work->large = is_large(site, *meeting);
  const int64_t pieces = static_cast<int64_t>(work->blocks) * (work->once ? 1 : world);
  const int64_t threads = std::clamp<int64_t>(bytes_of(*meeting) * world / kBytesPerBlock, 1,
                                              std::min<int64_t>(num_cores(), pieces));
  work->countdown = std::make_unique<Countdown>(meeting, threads);
  auto help = [work, meeting, pieces, consumer] {
    const KeepSubnormals keep;
    HostShared shared(1);
    for (int64_t i; (i = work->next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      HostBlock block(shared, static_cast<int>(i % work->blocks), work->blocks);
      block.set_streams(work->large);
      const int64_t r = i / work->blocks;
      if (!meeting->counts.empty())
        meet_counted<CpuAtom>(block, work->calls[r], consumer, meeting->counts[r],
                              work->from[r].address);
      else if (work->once)
        meet_once<CpuAtom>(block, work->calls[0], consumer, work->from[0].address, work->results);
      else
        meet(block, work->calls[r], consumer, work->from[r].address);
    }
    work->countdown->arrive();
  };
  if (threads > 1) Pool::instance().post_gang(std::vector<Pool::Task>(threads - 1, help));
  help();
}

int blocks_of(const Site& site) { return site.blocks > 0 ? site.blocks : 1; }

int64_t staging_of(const Site& site) {
  return site.staging_bytes > 0 ? std::min(site.staging_bytes, kCapacity.staging_half)
                                : kCapacity.staging_half;
}

// The windows of a gang: those of threads of this process, or shared with others.
struct Gang {
  GangQueue* queue = nullptr;
  char* windows = nullptr;
  std::shared_ptr<Peers> peers = nullptr;
  std::function<void()> after = [] {};
};

// The regimes that wait: the blocks of all ranks of this process at the same time.
template <class Consumer>
void run_gang(const Site& site, const std::shared_ptr<Meeting>& meeting, Consumer consumer,
              const Gang& gang) {
  struct Rank {
    CpuCall call;
    std::deque<HostShared> shared;
  };
  struct Outcome {
    std::mutex mutex;
    std::string error;
  };
  const int world = static_cast<int>(meeting->ranks.size());
  const int blocks = blocks_of(site);
  const bool large = is_large(site, *meeting);
  auto outcome = std::make_shared<Outcome>();
  std::vector<Pool::Task> tasks;
  for (int r = 0; r < world; ++r) {
    if (!meeting->here[r]) continue;
    auto rank = std::make_shared<Rank>();
    rank->call = call_of(*meeting, r);
    if (gang.windows == nullptr) windows().attach(site.partition, meeting->group, rank->call);
    for (int q = 0; q < world && gang.windows != nullptr; ++q)
      rank->call.window[q] = {gang.windows + q * window_bytes(world)};
    rank->call.capacity = kCapacity;
    rank->call.staging_used = staging_of(site);
    rank->call.packet_bytes = std::min(site.packet_bytes, most_packet_bytes<CpuAtom>(kCapacity));
    for (int b = 0; b < blocks; ++b) {
      rank->shared.emplace_back(1, r, gang.peers.get());
      tasks.push_back([=, peers = gang.peers, regime = site.regime] {
        const KeepSubnormals keep;
        HostBlock block(rank->shared[b], b, blocks);
        block.set_streams(large);
        try {
          if (peers != nullptr && peers->gone(r)) throw std::runtime_error(peers->why(r));
          if (rank->call.counted.sizes != nullptr)
            run_waiting_counted<CpuAtom>(block, regime, false, rank->call, consumer);
          else
            run_waiting<CpuAtom>(block, regime, false, rank->call, consumer);
        } catch (const std::exception& error) {
          const std::string why = peers != nullptr ? peers->left(error.what()) : error.what();
          std::lock_guard lock(outcome->mutex);
          outcome->error = why;
        }
      });
    }
  }
  gang.queue->post(std::move(tasks), [meeting, outcome, after = gang.after] {
    after();
    complete(meeting, outcome->error);
  });
}

}  // namespace

void complete(const std::shared_ptr<Meeting>& meeting, const std::string& error) {
  std::vector<Pool::Task> tasks;
  for (size_t r = 0; r < meeting->ranks.size(); ++r)
    if (meeting->here[r]) tasks.push_back([meeting, r, error] { meeting->ranks[r].done(error); });
  Pool::instance().post_gang(std::move(tasks));
}

int64_t window_bytes(int world) { return Window<CpuAtom::Packet>::bytes(world, kCapacity); }

bool reduces(const char* op, const char* dtype) {
  const Collective& row = kCollectives[find_collective("all_reduce")];
  return with_host_consumer<CpuAtom>(row, op, dtype, [](auto) {});
}

std::string refuse(const Site& site, const std::vector<Plan>& plans, const Counted& counted) {
  const Collective& row = site.collective();
  if (!with_host_consumer<CpuAtom>(row, site.reduce, site.dtype, [](auto) {}))
    return std::string(row.name) + " knows no " + site.reduce + " of " + site.dtype;
  const std::string regime = kRegimeNames[static_cast<int>(site.regime)];
  if (!fits(site.regime, row))
    return "regime " + regime + " makes no sense for " + std::string(row.name);
  CpuCall call;
  call.world = site.world;
  call.operands = static_cast<int>(plans.size());
  call.staging_used = staging_of(site);
  call.capacity = kCapacity;
  call.counted = counted;
  for (int o = 0; o < call.operands; ++o) call.operand[o].plan = plans[o];
  return purlin::refuse<CpuAtom>(call, site.regime, blocks_of(site));
}

void run(const Site& site, std::shared_ptr<Meeting> meeting) {
  if (site.collective().counted)
    if (const std::string wrong = count(site, *meeting); !wrong.empty()) {
      end_run(meeting->run, wrong);
      return complete(meeting, wrong);
    }
  with_host_consumer<CpuAtom>(site.collective(), site.reduce, site.dtype, [&](auto consumer) {
    if (site.regime == Regime::kMeet || bytes_of(*meeting) == 0)
      run_meet(site, meeting, consumer);
    else
      run_gang(site, meeting, consumer, {&gangs()});
  });
}

void run_shared(const Site& site, std::shared_ptr<Meeting> meeting, char* windows,
                std::shared_ptr<Peers> peers, std::function<void()> after) {
  static auto* shared = new GangQueue;
  GangQueue* queue = shared;
  with_host_consumer<CpuAtom>(site.collective(), site.reduce, site.dtype, [&](auto consumer) {
    run_gang(site, meeting, consumer, {queue, windows, std::move(peers), std::move(after)});
  });
}

}  // namespace purlin::threads
