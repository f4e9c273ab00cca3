// The processes of one host that share the memory of their GPUs: who has which, and where it is
// seen here.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "domain/link/link.h"
#include "domain/vmm/memory.h"

namespace purlin::vmm {

// A GPU as JAX numbers it, the same in all processes.
struct Member {
  int64_t id = 0;
  int process = 0;
  char* arena = nullptr;  // as this process sees it
  int64_t arena_bytes = 0;
};

// How a process joins the others.
struct Joining {
  int process = 0, count = 1;
  std::string name, token;                       // of the link
  std::vector<std::pair<int64_t, int>> devices;  // id and ordinal of its own
  bool lends = false;                            // whether its arrays lie in memory to share
  double seconds = 300;                          // to wait for the others
};

// What a process brings when it meets the others.
struct Own {
  std::vector<Member> members;                  // its GPUs
  std::set<std::pair<int64_t, int64_t>> blind;  // one sees no memory of the other
  int64_t used = 0;                             // of each arena, from its begin on
  int blocks = 0;                               // the widest grid that its GPUs hold
};

// Must live as long as the process, also when meet() fails.
class Neighbours : private link::Listener {
 public:
  // Called by threads of the link.
  struct Events {
    std::function<void(int process)> ended;
    std::function<void(uint64_t tag, const std::string& text)> named;  // a call site
    std::function<void(const std::string& text)> reported;
  };

  Neighbours(const Joining& joining, Events events);

  // Exchanges arenas with all others. Throws std::runtime_error.
  void meet(const Own& own);

  // After meet(): the GPUs of all processes; whether all processes lend their arrays; the widest
  // grid that all hold; and whether each of these GPUs sees the memory of all others.
  const std::vector<Member>& members() const { return members_; }
  bool lends() const { return lends_; }
  int blocks() const { return blocks_; }
  bool can_peer(const std::vector<int64_t>& ids) const;

  // Offset of the windows of a partition in all arenas, which process 0 decides; -1 where they are
  // full, in all processes. Throws std::runtime_error where process 0 does not answer.
  int64_t reserve(const std::string& partition, int64_t bytes);

  // What to add to an address in the allocation of `at` so that these processes see the same
  // memory, by process. Waits for them the first time. Throws std::runtime_error.
  std::vector<int64_t> lend(const void* at, const std::set<int>& processes);

  // Tells the others that this process runs a call site: "op in place (operands)".
  void name_site(uint64_t tag, const std::string& text);
  // Has another process print a report.
  void report(int process, const std::string& text);
  // What is known of a process that did not come to this call: a sentence, or nothing.
  std::string about(int process, uint64_t tag, const std::string& text) const;

  int process() const { return link_.process(); }
  bool has_ended(int process) const { return link_.has_ended(process); }

 private:
  using Lock = std::unique_lock<std::mutex>;

  void joined(int process) override;
  void receive(int from, link::Message& message, link::Descriptor descriptor) override;
  void ended(int process) override;

  void take_device(int from, link::Message& message, const link::Descriptor& descriptor);
  void take_loan(int from, link::Message& message, const link::Descriptor& descriptor);
  void take_answer(int from, link::Message& message);
  int64_t place_locked(const std::string& partition, int64_t bytes);
  template <class Done>
  void await(Lock& lock, const std::string& what, const std::set<int>& whom, Done done);

  const Joining joining_;
  const Events events_;
  std::vector<int> ordinals_;  // of the own GPUs
  std::set<int> everybody_;
  link::Link link_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;

  std::vector<Member> members_;
  std::set<std::pair<int64_t, int64_t>> blind_;  // one sees no memory of the other
  std::set<int> here_, shared_, looked_;         // processes that have come so far
  bool lends_ = true;
  int blocks_ = 1 << 30;

  int64_t used_;                            // of the arenas; of process 0
  std::map<std::string, int64_t> offsets_;  // of the windows of partitions; -1: full

  std::map<int, std::map<uint64_t, std::string>> sites_;  // that other processes have named

  struct Loan {
    int64_t bytes = 0;
    std::vector<int64_t> shift;  // of each process
    std::set<int> answered;      // processes that see it
    std::string error;           // of one that does not
  };
  std::mutex lending_;             // one new loan at a time
  std::map<int64_t, Loan> loans_;  // by the base of the allocation
};

}  // namespace purlin::vmm
