// Decides, in one of the processes, which collective all of them run next.
#include "domain/shm/coordinator.h"

#include <utility>

namespace purlin::shm {
namespace {

std::string listed(const std::vector<int>& numbers) {
  std::string text;
  for (int n : numbers) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return text;
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
         " since " + std::to_string(seconds).substr(0, 5) + " s. " +
         "Look at what its host thread does, or raise PURLIN_TIMEOUT_S";
}

void Coordinator::fail_locked(const std::string& key, const Open& open, const std::string& why) {
  for (int process : open.arrived)
    if (gone_.count(process) == 0) tell_(process, Order::kFail, key, 0, why);
  given_up_[key] = why;
  if (open.going) broken_[open.first.partition] = why;
}

// Offset of the windows of a group, which are there from the first use on; -1 if there is no room.
int64_t Coordinator::windows_locked(const Arrival& arrival) {
  const auto found = windows_.find(arrival.partition);
  if (found != windows_.end()) return found->second;
  const int64_t bytes = arrival.window_bytes * static_cast<int64_t>(arrival.process_of_rank.size());
  if (bytes > arena_ - used_) return -1;
  used_ += bytes;
  return windows_[arrival.partition] = used_ - bytes;
}

void Coordinator::arrive(Arrival arrival) {
  std::lock_guard lock(mutex_);
  const int process = arrival.process;
  const std::string key = arrival.key;
  const auto refuse = [&](const std::string& why) { tell_(process, Order::kFail, key, 0, why); };
  if (given_up_.count(key) != 0) return refuse(given_up_[key]);
  if (broken_.count(arrival.partition) != 0)
    return refuse("an earlier collective of these ranks failed: " + broken_[arrival.partition]);
  for (int other : needed(arrival))
    if (gone_.count(other) != 0)
      return refuse(arrival.what + ": process " + std::to_string(other) + " has ended");

  auto [at, fresh] = open_.try_emplace(key);
  Open& open = at->second;
  if (fresh) {
    open.since = Clock::now();
    open.first = std::move(arrival);
  } else if (open.first.arguments != arrival.arguments) {
    const std::string why = "ranks disagree: process " + std::to_string(open.first.process) +
                            " runs " + open.first.what + " with " + open.first.arguments +
                            ", and process " + std::to_string(process) + " runs " + arrival.what +
                            " with " + arrival.arguments + "; all must run the same program";
    open.arrived.insert(process);
    fail_locked(key, open, why);
    open_.erase(at);
    return;
  }
  open.arrived.insert(process);
  if (open.arrived != needed(open.first)) return;
  const int64_t offset = windows_locked(open.first);
  if (offset < 0) {
    fail_locked(key, open, "the shared memory is full; raise PURLIN_SHM_MIB");
    open_.erase(at);
    return;
  }
  open.going = true;
  for (int each : open.arrived) tell_(each, Order::kGo, key, offset, "");
  // What goes is kept until the next one of its partition, to know whom a failure concerns.
  for (auto other = open_.begin(); other != open_.end();)
    if (other != at && other->second.going && other->second.first.partition == open.first.partition)
      other = open_.erase(other);
    else
      ++other;
}

void Coordinator::failed(const std::string& key, const std::string& why) {
  std::lock_guard lock(mutex_);
  const auto at = open_.find(key);
  if (at == open_.end()) return;
  fail_locked(key, at->second, why);
  open_.erase(at);
}

void Coordinator::ended(int process) {
  std::lock_guard lock(mutex_);
  gone_.insert(process);
  for (auto at = open_.begin(); at != open_.end();) {
    const Open& open = at->second;
    // What goes finds out by itself whether anything is missing.
    if (open.going || needed(open.first).count(process) == 0) {
      ++at;
      continue;
    }
    fail_locked(at->first, open,
                open.first.what + ": process " + std::to_string(process) +
                    " has ended, and its ranks did not arrive: waited for " + missing(open));
    at = open_.erase(at);
  }
}

void Coordinator::look(Clock::time_point now) {
  std::lock_guard lock(mutex_);
  for (auto at = open_.begin(); at != open_.end();) {
    Open& open = at->second;
    const double seconds = std::chrono::duration<double>(now - open.since).count();
    if (open.going) {
      ++at;
      continue;
    }
    if (open.first.budget_s > 0 && seconds > open.first.budget_s) {
      fail_locked(at->first, open, describe(open, "gave up", now));
      at = open_.erase(at);
      continue;
    }
    if (seconds > open.first.slow_s && !std::exchange(open.reported, true))
      for (int process : open.arrived)
        tell_(process, Order::kReport, at->first, 0, describe(open, "slow", now));
    ++at;
  }
}

}  // namespace purlin::shm
