// Where the ranks of one call site meet, and the clock that ends meetings nobody completes.
#include "domain/threads/room.h"

#include <atomic>
#include <cstdio>
#include <deque>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "domain/text.h"
#include "domain/threads/pool.h"

namespace purlin::threads {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Looks at all rooms a few times a second. Lives as long as the process.
class Watcher {
 public:
  static Watcher& instance() {
    static Watcher* watcher = new Watcher;
    return *watcher;
  }

  void add(Room* room) {
    std::lock_guard lock(mutex_);
    rooms_.insert(room);
  }
  void remove(Room* room) {
    std::lock_guard lock(mutex_);
    rooms_.erase(room);
  }
  void publish(const std::string& text) {
    std::fprintf(stderr, "%s\n", text.c_str());
    std::fflush(stderr);
    std::lock_guard lock(report_mutex_);
    report_ = text;
  }
  std::string report() {
    std::lock_guard lock(report_mutex_);
    return report_;
  }

  void end_run(int64_t run, const std::string& error) {
    std::lock_guard lock(ended_mutex_);
    ended_.emplace_back(run, error);
    if (ended_.size() > kEndedRuns) ended_.pop_front();
  }
  // What ended a run; empty if nothing did.
  std::string end_of(int64_t run) {
    std::lock_guard lock(ended_mutex_);
    for (const auto& [ended, error] : ended_)
      if (ended == run) return error;
    return "";
  }

  std::atomic<double> slow_s{60};
  std::atomic<double> budget_s{1800};

 private:
  Watcher() {
    std::thread([this] {
      for (;; std::this_thread::sleep_for(std::chrono::milliseconds(200))) {
        std::lock_guard lock(mutex_);
        for (Room* room : rooms_) room->look(Clock::now());
      }
    }).detach();
  }

  std::mutex mutex_;
  std::set<Room*> rooms_;
  std::mutex report_mutex_;
  std::string report_;
  static constexpr size_t kEndedRuns = 64;  // more than run at the same time
  std::mutex ended_mutex_;
  std::deque<std::pair<int64_t, std::string>> ended_;  // the last ones
};

}  // namespace

Room::Room(const Site& site) : site_(site) { Watcher::instance().add(this); }
Room::~Room() { Watcher::instance().remove(this); }

std::shared_ptr<Meeting> Room::arrive(int64_t run, int position, const std::vector<Plan>& plans,
                                      Arrival arrival) {
  const int group = position / site_.world;
  const int rank = position % site_.world;
  const Key key{run, group};
  std::lock_guard lock(mutex_);
  if (given_up_.count(key) != 0)
    throw std::runtime_error("rank " + std::to_string(rank) + " came after the others gave up");
  auto [at, fresh] = open_.try_emplace(key);
  if (fresh) {
    at->second.since = Clock::now();
    at->second.meeting = std::make_shared<Meeting>();
    at->second.meeting->run = run;
    at->second.meeting->group = group;
    at->second.meeting->expected = local_ranks(group);
    at->second.meeting->ranks.resize(site_.world);
    at->second.meeting->here.resize(site_.world);
    at->second.meeting->plans = plans;
  }
  std::shared_ptr<Meeting> meeting = at->second.meeting;
  if (meeting->here[rank]) throw std::logic_error("a rank arrived twice at one collective");
  meeting->here[rank] = true;
  meeting->ranks[rank] = std::move(arrival);
  if (++meeting->arrived < meeting->expected) return nullptr;
  open_.erase(at);
  return meeting;
}

bool Room::is_local(int group, int rank) const {
  return site_.processes.empty() || site_.process_of(group * site_.world + rank) == own_process();
}

int Room::local_ranks(int group) const {
  int count = 0;
  for (int r = 0; r < site_.world; ++r) count += is_local(group, r);
  return count;
}

int64_t Room::occurrence(int64_t run, int group) {
  constexpr int64_t kRecent = 64;  // runs that may still be on their way
  std::lock_guard lock(mutex_);
  while (!met_.empty() && met_.begin()->first.first < run - kRecent) met_.erase(met_.begin());
  return met_[{run, group}]++;
}

void Room::look(Clock::time_point now) {
  const double slow_s = Watcher::instance().slow_s, budget_s = Watcher::instance().budget_s;
  struct Ended {
    std::shared_ptr<Meeting> meeting;
    std::string text;
  };
  std::vector<Ended> ended;
  {
    std::lock_guard lock(mutex_);
    for (auto at = open_.begin(); at != open_.end();) {
      Open& open = at->second;
      const double seconds = Seconds(now - open.since).count();
      if (std::string error = Watcher::instance().end_of(at->first.first); !error.empty()) {
        ended.push_back({open.meeting, std::move(error)});
        at = open_.erase(at);
        continue;
      }
      if (budget_s > 0 && seconds > budget_s) {
        ended.push_back({open.meeting, describe(*open.meeting, "gave up", seconds)});
        Watcher::instance().publish("purlin: " + ended.back().text);
        given_up_.insert(at->first);
        at = open_.erase(at);
        continue;
      }
      if (seconds > slow_s && !std::exchange(open.reported, true))
        Watcher::instance().publish("purlin: " + describe(*open.meeting, "slow", seconds));
      ++at;
    }
  }
  for (auto& [meeting, text] : ended)
    for (size_t r = 0; r < meeting->ranks.size(); ++r)
      if (meeting->here[r])
        Pool::instance().post(
            [meeting = meeting, r, text = text] { meeting->ranks[r].done(text); });
}

std::string Room::describe(const Meeting& meeting, const char* what, double seconds) const {
  std::string missing;
  for (size_t r = 0; r < meeting.here.size(); ++r)
    if (!meeting.here[r] && is_local(meeting.group, static_cast<int>(r)))
      missing += (missing.empty() ? "" : ", ") + std::to_string(r);
  return std::string(what) + ": " + std::string(site_.collective().name) + " at " + site_.text +
         ": group " + std::to_string(meeting.group) + " of " + std::to_string(site_.world) +
         " ranks waits for rank " + missing + " since " + in_seconds(seconds) +
         ". The rank did not arrive: look at what its host thread does, or raise "
         "PURLIN_TIMEOUT_S";
}

void publish(const std::string& text) { Watcher::instance().publish(text); }

Limits limits() { return {Watcher::instance().slow_s, Watcher::instance().budget_s}; }

namespace {
std::atomic<int> the_process{0};
}
void set_process(int process) { the_process = process; }
int own_process() { return the_process; }

void set_limits(double slow_s, double budget_s) {
  Watcher::instance().slow_s = slow_s;
  Watcher::instance().budget_s = budget_s;
}

void end_run(int64_t run, const std::string& error) { Watcher::instance().end_run(run, error); }

std::string last_report() { return Watcher::instance().report(); }

}  // namespace purlin::threads
