// Where the ranks of one call site meet, and the clock that ends meetings nobody completes.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "domain/site.h"
#include "domain/threads/meeting.h"

namespace purlin::threads {

// The meetings of one call site. A meeting is found by the run and the group. A rank cannot arrive
// twice at one meeting, since what follows its call needs the call's result; so no epoch is needed,
// and nothing is kept between calls.
class Room {
 public:
  explicit Room(const Site& site);
  ~Room();
  Room(const Room&) = delete;

  // Adds the rank at `position` of the partition; returns the meeting once all ranks that belong to
  // this process are there. Throws where the meeting has been given up.
  std::shared_ptr<Meeting> arrive(int64_t run, int position, const std::vector<Plan>& plans,
                                  Arrival arrival);

  // How often the ranks of this process have met before in this run and group.
  int64_t occurrence(int64_t run, int group);

  // Reports meetings that are open for long, and ends those that are open for too long or whose run
  // has ended.
  void look(std::chrono::steady_clock::time_point now);

 private:
  struct Open {
    std::shared_ptr<Meeting> meeting;
    std::chrono::steady_clock::time_point since;
    bool reported = false;
  };
  using Key = std::pair<int64_t, int>;  // run and group

  std::string describe(const Meeting& meeting, const char* what, double seconds) const;

  const Site& site_;
  std::mutex mutex_;
  std::map<Key, Open> open_;
  bool is_local(int group, int rank) const;
  int local_ranks(int group) const;

  std::map<Key, int64_t> met_;  // of recent runs, where other processes take part
  std::set<Key> given_up_;      // for ranks that come late; empty unless something went wrong
};

// Prints a report and keeps it as the last one.
void publish(const std::string& text);

struct Limits {
  double slow_s, budget_s;
};
Limits limits();

// The process that this is among those of a job; 0 unless told otherwise.
void set_process(int process);
int own_process();

// Seconds after which an incomplete meeting is reported, and after which it ends in an error; 0
// never ends it.
void set_limits(double slow_s, double budget_s);

// Ends meetings of a run, those to come too, in an error: for a group that will not come to them.
void end_run(int64_t run, const std::string& error);

// The last report, as printed on stderr; empty if there was none.
std::string last_report();

}  // namespace purlin::threads
