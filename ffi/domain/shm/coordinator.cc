// Decides, in one of the processes, which collective all of them run next.
#include "domain/shm/coordinator.h"

#include <algorithm>
#include <utility>

#include "domain/text.h"

namespace purlin::shm {
namespace {

constexpr double kGraceSeconds = 0.5;  // before runs of different names are taken for the same

std::string key_of(const Arrival& arrival) {
  return arrival.place + " " + std::to_string(arrival.run);
}

}  // namespace

std::set<int> Coordinator::needed(const Arrival& arrival) {
  return {arrival.process_of_rank.begin(), arrival.process_of_rank.end()};
}

// "rank 2, 3 (process 1)"
std::string Coordinator::missing(const Open& open) {
  std::string text;
  for (int process : needed(open.first)) {
    if (open.arrived.count(process) != 0) continue;
    std::vector<int> ranks;
    for (size_t r = 0; r < open.first.process_of_rank.size(); ++r)
      if (open.first.process_of_rank[r] == process) ranks.push_back(static_cast<int>(r));
    text += (text.empty() ? "" : " and ");
    text += "rank " + listed(ranks) + " (process " + std::to_string(process) + ")";
  }
  return text;
}

std::string Coordinator::describe(const Open& open, const char* what, Clock::time_point now) const {
  const double seconds = std::chrono::duration<double>(now - open.since).count();
  return std::string(what) + ": " + open.first.what + ": a group of " +
         std::to_string(open.first.process_of_rank.size()) + " ranks waits for " + missing(open) +
         " since " + in_seconds(seconds) + ". " + advice(open);
}

// Whom the others wait for may wait for them, at the same call site of another program. Or null.
const Coordinator::Open* Coordinator::rival(const Open& open) const {
  for (const auto& [_, other] : open_)
    if (other.first.what == open.first.what && other.first.partition == open.first.partition &&
        open.arrived.count(other.first.process) == 0)
      return &other;
  return nullptr;
}

std::string Coordinator::advice(const Open& open) const {
  const Open* other = rival(open);
  if (other == nullptr) return "Look at what its host thread does, or raise PURLIN_TIMEOUT_S";
  const bool alike = other->first.arguments == open.first.arguments;
  return "The ranks disagree: process " + std::to_string(open.first.process) + " runs it with " +
         open.first.arguments + ", and process " + std::to_string(other->first.process) +
         (alike ? " with the same in another program or another run of it"
                : " with " + other->first.arguments) +
         "; all must run the same programs in the same order";
}

void Coordinator::fail_all_locked(const Open& open, const std::string& why) {
  for (const auto& [process, own] : open.arrived)
    if (gone_.count(process) == 0) tell_(process, Order::kFail, own.key, 0, why);
}

void Coordinator::report_locked(const Open& open, int process) {
  if (!missing(open).empty())
    tell_(process, Order::kReport, open.arrived.at(process).key, 0,
          describe(open, "slow", Clock::now()));
}

// Nothing of the program's run will end well: some devices have left it.
void Coordinator::end_run_locked(int64_t run, const std::string& why) {
  const bool known = std::any_of(ended_runs_.begin(), ended_runs_.end(),
                                 [&](const auto& ended) { return ended.first == run; });
  if (!known) ended_runs_.emplace_back(run, why);
  if (ended_runs_.size() > kEndedRuns) ended_runs_.pop_front();
  for (auto at = open_.begin(); at != open_.end();) {
    if (at->second.first.run != run) {
      ++at;
      continue;
    }
    fail_all_locked(at->second, why);
    given_up_[at->first] = why;
    at = open_.erase(at);
  }
}

void Coordinator::fail_locked(const std::string& key, const std::string& why) {
  const auto at = open_.find(key);
  if (at != open_.end()) end_run_locked(at->second.first.run, why);
}

// Offset of the windows of a group, which are there from the first use on; -1 if there is no room.
int64_t Coordinator::windows_locked(const Arrival& arrival) {
  const auto found = windows_.find(arrival.partition);
  if (found != windows_.end()) return found->second.offset;
  const int64_t bytes = arrival.window_bytes * static_cast<int64_t>(arrival.process_of_rank.size());
  if (bytes > arena_ - used_) return -1;
  used_ += bytes;
  windows_[arrival.partition] = {used_ - bytes, needed(arrival)};
  return used_ - bytes;
}

void Coordinator::arrive(Arrival arrival) {
  std::lock_guard lock(mutex_);
  const int process = arrival.process;
  const Member own = {arrival.key, arrival.run};
  arrival.run = runs_.common(process, arrival.place, arrival.run);
  const std::string key = key_of(arrival);
  const auto refuse = [&](const std::string& why) {
    tell_(process, Order::kFail, own.key, 0, why);
    end_run_locked(arrival.run, why);  // the other ranks must not wait for this one further on
  };
  if (given_up_.count(key) != 0) return refuse(given_up_[key]);
  for (const auto& [run, why] : ended_runs_)
    if (run == arrival.run) return refuse(why);
  if (broken_.count(arrival.partition) != 0)
    return refuse(arrival.what +
                  ": an earlier collective of these ranks failed: " + broken_[arrival.partition]);
  for (int other : needed(arrival))
    if (gone_.count(other) != 0)
      return refuse(arrival.what + ": process " + std::to_string(other) + " has ended");

  auto [at, fresh] = open_.try_emplace(key);
  Open& open = at->second;
  if (fresh) {
    open.since = Clock::now();
    open.first = std::move(arrival);
  } else if (open.first.arguments != arrival.arguments) {
    open.arrived[process] = own;
    return fail_locked(key, "ranks disagree: process " + std::to_string(open.first.process) +
                                " runs " + open.first.what + " with " + open.first.arguments +
                                ", and process " + std::to_string(process) + " runs " +
                                arrival.what + " with " + arrival.arguments +
                                "; all must run the same program");
  }
  open.arrived[process] = own;
  if (open.reported) report_locked(open, process);
  go_if_complete_locked(key);
}

void Coordinator::go_if_complete_locked(const std::string& key) {
  const auto at = open_.find(key);
  const Open& open = at->second;
  if (open.arrived.size() < needed(open.first).size()) return;
  const int64_t offset = windows_locked(open.first);
  if (offset < 0)
    return fail_locked(key, open.first.what + ": the shared memory is full; raise PURLIN_SHM_MIB");
  for (const auto& [each, own] : open.arrived) tell_(each, Order::kGo, own.key, offset, "");
  open_.erase(at);
}

// Finds processes that wait for each other at the same place, in runs that they call differently,
// for one has taken its program out of a cache; and tells them that the runs are the same.
bool Coordinator::join_runs_locked(Clock::time_point now) {
  const auto waits = [&](const Open& open) {
    return std::chrono::duration<double>(now - open.since).count() > kGraceSeconds;
  };
  for (auto& [key, open] : open_)
    for (auto other = open_.begin(); other != open_.end(); ++other) {
      const Arrival &one = open.first, &two = other->second.first;
      if (one.run == two.run || one.place != two.place || one.arguments != two.arguments ||
          !(one.cached || two.cached) || !waits(open) || !waits(other->second))
        continue;
      const auto& theirs = other->second.arrived;
      if (open.arrived.begin()->first > theirs.begin()->first) continue;  // the lowest gives names
      bool apart = true;
      for (const auto& [process, _] : theirs) apart = apart && open.arrived.count(process) == 0;
      if (!apart) continue;
      for (const auto& [process, own] : theirs) {
        runs_.learn(process, one.place, own.run, one.run);
        open.arrived[process] = own;
      }
      open_.erase(other);
      go_if_complete_locked(std::string(key));
      return true;
    }
  return false;
}

// Calls of the same windows may have started behind this one: they fail too, since the ranks have
// not left the windows in the same state.
void Coordinator::failed(int by, const std::string& key, const std::string& partition, int64_t run,
                         const std::string& why) {
  std::lock_guard lock(mutex_);
  if (!broken_.emplace(partition, why).second) return end_run_locked(runs_.common(by, run), why);
  const auto windows = windows_.find(partition);
  if (windows == windows_.end()) return;
  for (int process : windows->second.processes) {
    if (gone_.count(process) != 0) continue;
    tell_(process, Order::kFail, key, 0, why);
    tell_(process, Order::kBroken, partition, 0, why);
  }
  end_run_locked(runs_.common(by, run), why);
}

void Coordinator::ended(int process) {
  std::lock_guard lock(mutex_);
  gone_.insert(process);
  std::map<std::string, std::string>
      lost;  // what has started finds out whether anything is missing
  for (const auto& [key, open] : open_)
    if (needed(open.first).count(process) != 0)
      lost[key] = open.first.what + ": process " + std::to_string(process) +
                  " has ended, and its ranks did not arrive: waited for " + missing(open);
  for (const auto& [key, why] : lost) fail_locked(key, why);
}

void Coordinator::look(Clock::time_point now) {
  std::lock_guard lock(mutex_);
  while (join_runs_locked(now)) continue;
  std::map<std::string, std::string> late;
  const auto give_up = [&](const Open& open) {
    late[key_of(open.first)] = describe(open, "gave up", now);
  };
  for (auto& [key, open] : open_) {
    const double seconds = std::chrono::duration<double>(now - open.since).count();
    if (open.first.budget_s > 0 && seconds > open.first.budget_s) {
      give_up(open);
      if (const Open* other = rival(open); other != nullptr) give_up(*other);
    }
    if (seconds > open.first.slow_s && !std::exchange(open.reported, true))
      for (const auto& [process, _] : open.arrived) report_locked(open, process);
  }
  for (const auto& [key, why] : late) fail_locked(key, why);
}

}  // namespace purlin::shm
