// The domain of CPU devices that belong to several processes of one host.
//
// The processes share one arena of memory without a name, whose descriptor travels over a Unix
// socket. Process 0 keeps it and coordinates. Nothing is left when they end, however they do.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "domain/link/link.h"
#include "domain/shm/coordinator.h"
#include "snac/host_block.h"

namespace purlin::shm {

class Domain;

// A collective that a process takes part in.
class Running : public Peers {
 public:
  Running(Domain& domain, const Arrival& arrival)
      : domain_(domain),
        key_(arrival.key),
        what_(arrival.what),
        process_of_rank_(arrival.process_of_rank),
        slow_s_(arrival.slow_s),
        budget_s_(arrival.budget_s) {}

  bool gone(int rank) const override;
  std::string why(int rank) const override;
  void waits(int rank, double seconds) const override;
  std::string left(const std::string& error) override;
  void stop(const std::string& why);  // the first one counts

 private:
  Domain& domain_;
  const std::string key_, what_;
  const std::vector<int> process_of_rank_;
  const double slow_s_, budget_s_;
  mutable std::atomic_flag slow_ = ATOMIC_FLAG_INIT;  // reported
  mutable std::mutex mutex_;
  std::string why_;
  std::atomic<bool> stopped_{false};
};

class Domain : private link::Listener {
 public:
  // Joins the processes 0 .. count - 1 that say the same name and token; the others wait for
  // process 0 for so long. Throws std::runtime_error.
  static void start(int process, int count, const std::string& name, const std::string& token,
                    int64_t arena_bytes, double seconds);
  static Domain* running();  // or null

  struct Call {
    Arrival arrival;
    std::shared_ptr<Running> running;
    std::function<void(char* windows)> go;         // called in the order of all processes
    std::function<void(const std::string&)> fail;  // instead of go; null after it
    bool left = false;                             // by a rank of this process, before its end
    std::chrono::steady_clock::time_point since = {};
    bool reported = false;
  };
  void submit(Call call);
  // A rank of this process has left the call of this key before its end.
  void left(const std::string& key, const std::string& error);
  // The call of this key has ended, one way or the other.
  void finish(const std::string& key);

  bool has_ended(int process) const { return link_.has_ended(process); }
  int process() const { return link_.process(); }

 private:
  Domain(int process, int count) : link_(process, count, *this) {}
  void joined(int process) override;
  void receive(int from, link::Message& message, link::Descriptor descriptor) override;
  void ended(int process) override;
  void lead(int64_t arena_bytes);
  void tell(int process, Order order, const std::string& key, int64_t offset,
            const std::string& text);
  void obey(Order order, const std::string& key, int64_t offset, const std::string& text);
  static void end(const Call& call, const std::string& why);
  void tell_failed(const Arrival& arrival, const std::string& why);
  void break_partition(const std::string& partition, const std::string& why);
  void leader_is_gone();
  void look();  // reports and ends calls that process 0 does not answer

  link::Link link_;
  link::Descriptor arena_fd_;
  int64_t arena_bytes_ = 0;
  char* arena_ = nullptr;
  std::promise<void> has_arena_;  // kept by the first descriptor, or by the end of process 0
  std::once_flag kept_;

  std::unique_ptr<Coordinator> coordinator_;  // of process 0

  std::mutex mutex_;
  std::map<std::string, Call> calls_;          // submitted, and not finished
  std::map<std::string, std::string> broken_;  // partition: why its windows cannot be used
  std::map<std::string, Arrival> given_up_;  // not answered in time; process 0 may go on with them
};

}  // namespace purlin::shm
