// A block of the host: one or more threads that share a barrier and some scratch.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "snac/call.h"
#include "snac/faults.h"

namespace purlin {

// Who may leave a call before its end: ranks of other processes.
class Peers {
 public:
  virtual ~Peers() = default;
  virtual bool gone(int rank) const = 0;
  virtual std::string why(int rank) const = 0;
  // A rank waits for one that is there. Throws std::runtime_error after too long.
  virtual void waits(int rank, double seconds) const = 0;
  // A rank of this process leaves the call before its end, and so must the others. What all say.
  virtual std::string left(const std::string& error) = 0;
};

// What the threads of one block share. One for each block, for as long as its threads run.
class HostShared {
 public:
  explicit HostShared(int threads, int rank = 0, const Peers* peers = nullptr)
      : rank(rank), peers(peers), threads_(threads) {}

  const int rank;
  const Peers* const peers;  // null where all ranks are threads of this process

  const char* from[kMaxOperands][kMaxRanks] = {};
  const char* results[kMaxOperands][kMaxRanks] = {};
  char* to[kMaxOperands][kMaxRanks] = {};
  Counts counts = {};

  // A sense-reversing barrier that yields: blocks may outnumber the cores.
  void sync() {
    if (threads_ == 1) return;
    const uint32_t round = __atomic_load_n(&round_, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == threads_) {
      __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&round_, round + 1, __ATOMIC_RELEASE);
      return;
    }
    while (__atomic_load_n(&round_, __ATOMIC_ACQUIRE) == round) sched_yield();
  }

 private:
  const int threads_;
  int arrived_ = 0;
  uint32_t round_ = 0;
};

class HostBlock {
 public:
  HostBlock(HostShared& shared, int index, int count, int thread = 0, int threads = 1)
      : shared_(shared), index_(index), count_(count), thread_(thread), threads_(threads) {}

  int index() const { return index_; }
  int count() const { return count_; }
  int thread() const { return thread_; }
  int threads() const { return threads_; }
  HostShared& shared() { return shared_; }

  // Whether what is written is better kept out of the caches: all ranks together write more than
  // fits.
  bool streams() const { return streams_; }
  void set_streams(bool streams) { streams_ = streams; }

  void sync() { shared_.sync(); }

  void record() const {}  // calls are counted where ranks arrive

  // Announcements order themselves here.
  static void release() {}

  // Tells a peer where an operand lies, after everything that this thread did before.
  static void announce(Notify* at, uint64_t address, uint64_t flag) {
    __atomic_store_n(&at->address, address, __ATOMIC_RELAXED);
    __atomic_store_n(&at->flag, flag, __ATOMIC_RELEASE);
  }
  // Waits for the announcement with `flag`, and for what its sender did before it.
  uint64_t receive(const Notify* at, uint64_t flag, Where where) {
    uint64_t seen;
    while ((seen = __atomic_load_n(&at->flag, __ATOMIC_ACQUIRE)) != flag)
      stalled(where, flag, seen);
    relax();
    return __atomic_load_n(&at->address, __ATOMIC_RELAXED);
  }

  // Releases everything that this block did before its last sync.
  static void signal(uint64_t* at, uint64_t v) { __atomic_store_n(at, v, __ATOMIC_RELEASE); }

  // Acquires what the peer released with `v` or a later value.
  void await(const uint64_t* at, uint64_t v, Where where) {
    uint64_t seen;
    while ((seen = __atomic_load_n(at, __ATOMIC_ACQUIRE)) < v) stalled(where, v, seen);
    relax();
  }

  // Called once for each look that found nothing. Throws std::runtime_error where the peer is gone:
  // seen twice, since it may have done its part just before.
  void stalled(Where where, uint64_t /*expected*/, uint64_t /*seen*/) {
    if (++spins_ <= kSpinsBeforeYield) return;
    sched_yield();
    if (shared_.peers == nullptr) return;
    if (spins_ == kSpinsBeforeYield + 1) since_ = Clock::now();
    if (!shared_.peers->gone(where.peer))
      return shared_.peers->waits(where.peer, Seconds(Clock::now() - since_).count());
    if (seen_gone_) throw std::runtime_error(shared_.peers->why(where.peer));
    seen_gone_ = true;
  }
  void relax() { spins_ = 0, seen_gone_ = false; }

  // Throws std::runtime_error for counts that would write out of bounds.
  void refuse(const Finding& found, int peer) const {
    if (found.fault != Fault::kNone)
      throw std::runtime_error("bad counts: " + describe(found, shared_.rank, peer));
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  static constexpr int kSpinsBeforeYield = 64;
  HostShared& shared_;
  const int index_, count_, thread_, threads_;
  int64_t spins_ = 0;
  Clock::time_point since_;  // of the wait, once it yields
  bool seen_gone_ = false;
  bool streams_ = false;
};

}  // namespace purlin
