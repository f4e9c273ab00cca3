// Decides, in one of the processes, which collective all of them run next.
//
// Devices reach independent collectives in any order, and collectives of one partition share
// windows; so processes must agree on an order. A process says when all its ranks have arrived at a
// collective. Once all processes have, all are told to go, in an order that is the same for all.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "domain/shm/runs.h"

namespace purlin::shm {

// "All ranks of this process have arrived."
struct Arrival {
  int process = 0;
  std::string key;           // of the collective in this process
  std::string place;         // the key but for the run, the same in all processes
  std::string arguments;     // shapes, types and so on, which must be the same in all processes
  std::string what;          // op and call site, for reports
  std::string partition;     // which windows it uses
  int64_t run = 0;           // of the program, as this process numbers it
  bool cached = false;       // whether the program may have come out of a cache
  int64_t window_bytes = 0;  // of one rank
  std::vector<int> process_of_rank;  // of the ranks of its group
  double slow_s = 60, budget_s = 1800;
};

// What a process is told.
enum class Order : int64_t {
  kGo,      // key, offset of the group's windows in the arena
  kFail,    // key, why
  kReport,  // key, text to print: somebody is late
  kBroken   // partition, why: what uses its windows cannot end well
};

class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;
  // Tells a process. Called in order, under a lock.
  using Tell = std::function<void(int process, Order, const std::string& key, int64_t offset,
                                  const std::string& text)>;

  Coordinator(Tell tell, int64_t arena_bytes) : tell_(std::move(tell)), arena_(arena_bytes) {}

  void arrive(Arrival arrival);
  // A process could not finish a collective that it was told to start.
  void failed(int process, const std::string& key, const std::string& partition, int64_t run,
              const std::string& why);
  // A process has ended; what waits for it fails.
  void ended(int process);
  // Reports and ends what waits for too long.
  void look(Clock::time_point now);

 private:
  struct Member {
    std::string key;
    int64_t run;
  };
  struct Open {
    Arrival first;                  // with the run's common name
    std::map<int, Member> arrived;  // of each process
    Clock::time_point since;
    bool reported = false;
  };
  struct Windows {
    int64_t offset;  // in the arena
    std::set<int> processes;
  };
  static constexpr size_t kEndedRuns = 64;  // more than run at the same time

  static std::set<int> needed(const Arrival& arrival);
  static std::string missing(const Open& open);
  std::string describe(const Open& open, const char* what, Clock::time_point now) const;
  const Open* rival(const Open& open) const;
  std::string advice(const Open& open) const;
  void report_locked(const Open& open, int process);
  void fail_locked(const std::string& key, const std::string& why);
  void fail_all_locked(const Open& open, const std::string& why);
  void go_if_complete_locked(const std::string& key);
  bool join_runs_locked(Clock::time_point now);
  void end_run_locked(int64_t run, const std::string& why);
  int64_t windows_locked(const Arrival& arrival);

  const Tell tell_;
  std::mutex mutex_;
  Runs runs_;
  std::map<std::string, Open> open_;             // place and run: what some processes wait for
  std::map<std::string, std::string> given_up_;  // the same: why, for those who come late
  std::map<std::string, std::string> broken_;    // partition: why its windows cannot be used
  std::map<std::string, Windows> windows_;       // of each partition
  std::deque<std::pair<int64_t, std::string>> ended_runs_;  // the last ones, and why
  std::set<int> gone_;
  int64_t arena_;
  int64_t used_ = 0;
};

}  // namespace purlin::shm
