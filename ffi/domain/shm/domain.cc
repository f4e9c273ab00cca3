// The domain of CPU devices that belong to several processes of one host.
#include "domain/shm/domain.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "domain/text.h"
#include "domain/threads/room.h"

namespace purlin::shm {
namespace {

using link::Message;
using Clock = Coordinator::Clock;

Domain* the_domain = nullptr;

enum class Kind : int64_t { kArena, kArrive, kFailed, kOrder };

Message begin(Kind kind) { return std::move(Message().put(static_cast<int64_t>(kind))); }

int64_t milliseconds(double seconds) {  // which may be infinite
  return static_cast<int64_t>(std::min(seconds * 1e3, 1e15));
}

Message pack(const Arrival& a) {
  Message message = begin(Kind::kArrive);
  message.put(a.key)
      .put(a.place)
      .put(a.arguments)
      .put(a.what)
      .put(a.partition)
      .put(a.run)
      .put(int64_t{a.cached});
  message.put(a.window_bytes);
  message.put(static_cast<int64_t>(a.process_of_rank.size()));
  for (int process : a.process_of_rank) message.put(process);
  message.put(milliseconds(a.slow_s)).put(milliseconds(a.budget_s));
  return message;
}

Arrival unpack(Message& message, int process) {
  Arrival a;
  a.process = process;
  a.key = message.text(), a.place = message.text(), a.arguments = message.text(),
  a.what = message.text();
  a.partition = message.text(), a.run = message.number(), a.cached = message.number() != 0,
  a.window_bytes = message.number();
  a.process_of_rank.resize(message.number());
  for (int& each : a.process_of_rank) each = static_cast<int>(message.number());
  a.slow_s = message.number() / 1e3, a.budget_s = message.number() / 1e3;
  return a;
}

char* map_arena(int fd, int64_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (at == MAP_FAILED)
    throw std::runtime_error(std::string("cannot map shared memory: ") + std::strerror(errno));
  return static_cast<char*>(at);
}

constexpr double kAnswerSeconds = 2;  // in which process 0 reports or ends what waits too long

constexpr const char* kNoAnswer =
    "process 0, which says when collectives of several processes begin, has not answered in time. "
    "See whether it has been stopped, or raise PURLIN_TIMEOUT_S";

void every(std::chrono::milliseconds period, std::function<void()> look) {
  std::thread([period, look = std::move(look)] {
    for (;; std::this_thread::sleep_for(period)) look();
  }).detach();
}

std::string after_failure(const Domain::Call& call, const std::string& why) {
  return call.arrival.what + ": an earlier collective of these ranks failed: " + why;
}

}  // namespace

bool Running::gone(int rank) const {
  return stopped_.load(std::memory_order_acquire) || domain_.has_ended(process_of_rank_[rank]);
}

std::string Running::why(int rank) const {
  std::lock_guard lock(mutex_);
  if (!why_.empty()) return why_;
  return "rank " + std::to_string(rank) + " is gone: process " +
         std::to_string(process_of_rank_[rank]) + " has ended during the collective";
}

void Running::waits(int rank, double seconds) const {
  const bool late = budget_s_ > 0 && seconds > budget_s_;
  if (!late && (seconds <= slow_s_ || slow_.test_and_set())) return;
  const std::string text = "rank " + std::to_string(rank) + " (process " +
                           std::to_string(process_of_rank_[rank]) +
                           ") has not gone on with the collective for " + in_seconds(seconds) +
                           ". Look at what its process does, or raise PURLIN_TIMEOUT_S";
  if (late) throw std::runtime_error("gave up: " + text);
  threads::publish("purlin: slow: " + what_ + ": " + text);
}

std::string Running::left(const std::string& error) {
  if (!stopped_.load(std::memory_order_acquire)) {
    stop(what_ + ": " + error);
    domain_.left(key_, why(0));
  }
  return why(0);
}

void Running::stop(const std::string& why) {
  std::lock_guard lock(mutex_);
  if (why_.empty()) why_ = why;
  stopped_.store(true, std::memory_order_release);
}

Domain* Domain::running() { return the_domain; }

void Domain::start(int process, int count, const std::string& name, const std::string& token,
                   int64_t arena_bytes, double seconds) {
  if (the_domain != nullptr) return;
  auto* domain = new Domain(process, count);  // lives as long as the process
  if (process == 0) domain->lead(arena_bytes);
  domain->link_.join(name, token, seconds);
  if (process != 0) {
    std::future<void> arena = domain->has_arena_.get_future();
    if (arena.wait_for(std::chrono::duration<double>(seconds)) != std::future_status::ready)
      throw std::runtime_error("process 0 did not answer within " + in_seconds(seconds) +
                               "; see whether it has been stopped, or raise PURLIN_JOIN_S");
    arena.get();
    every(std::chrono::milliseconds(200), [domain] { domain->look(); });
  }
  the_domain = domain;
}

void Domain::lead(int64_t arena_bytes) {
  arena_fd_ = link::Descriptor(memfd_create("purlin", MFD_CLOEXEC));
  if (arena_fd_.get() < 0 || ftruncate(arena_fd_.get(), arena_bytes) != 0)
    throw std::runtime_error(std::string("no shared memory: ") + std::strerror(errno));
  arena_bytes_ = arena_bytes;
  arena_ = map_arena(arena_fd_.get(), arena_bytes);
  coordinator_ = std::make_unique<Coordinator>(
      [this](int process, Order order, const std::string& key, int64_t offset,
             const std::string& text) { tell(process, order, key, offset, text); },
      arena_bytes);
  every(std::chrono::milliseconds(100), [this] { coordinator_->look(Clock::now()); });
}

// Who is gone is noticed by the link.
void Domain::tell(int process, Order order, const std::string& key, int64_t offset,
                  const std::string& text) {
  if (process == 0) return obey(order, key, offset, text);
  Message message = begin(Kind::kOrder);
  link_.send(process, message.put(static_cast<int64_t>(order)).put(key).put(offset).put(text));
}

void Domain::joined(int process) {
  link_.send(process, begin(Kind::kArena).put(arena_bytes_), arena_fd_.get());
}

void Domain::receive(int from, Message& message, link::Descriptor descriptor) {
  const auto kind = static_cast<Kind>(message.number());
  if (kind == Kind::kArena) {
    std::call_once(kept_, [&] {
      try {
        arena_bytes_ = message.number();
        arena_fd_ = std::move(descriptor);
        arena_ = map_arena(arena_fd_.get(), arena_bytes_);
        has_arena_.set_value();
      } catch (const std::exception&) {
        has_arena_.set_exception(std::current_exception());
      }
    });
  } else if (kind == Kind::kArrive) {
    coordinator_->arrive(unpack(message, from));
  } else if (kind == Kind::kFailed) {
    const std::string key = message.text(), partition = message.text();
    const int64_t run = message.number();
    coordinator_->failed(from, key, partition, run, message.text());
  } else {
    const auto order = static_cast<Order>(message.number());
    const std::string key = message.text();
    const int64_t offset = message.number();
    obey(order, key, offset, message.text());
  }
}

void Domain::ended(int process) {
  if (coordinator_ != nullptr) return coordinator_->ended(process);
  if (process == 0) leader_is_gone();
}

void Domain::leader_is_gone() {
  std::call_once(kept_, [&] {
    has_arena_.set_exception(std::make_exception_ptr(std::runtime_error(
        "process 0 refused the connection: another user, or another job; or it has ended")));
  });
  std::map<std::string, Call> calls;
  {
    std::lock_guard lock(mutex_);
    calls = calls_;
  }
  for (const auto& [key, call] : calls)
    obey(Order::kFail, key, 0, call.arrival.what + ": process 0 has ended");
}

void Domain::submit(Call call) {
  const Arrival arrival = call.arrival;
  call.since = Clock::now();
  bool twice;
  {
    std::lock_guard lock(mutex_);
    twice = calls_.count(arrival.key) != 0;
    if (!twice) calls_[arrival.key] = std::move(call);
  }
  if (twice)
    return call.fail(arrival.what + ": two calls at the same time that nothing tells apart");
  if (coordinator_ != nullptr)
    coordinator_->arrive(arrival);
  else if (!link_.send(0, pack(arrival)))
    leader_is_gone();
}

void Domain::obey(Order order, const std::string& key, int64_t offset, const std::string& text) {
  if (order == Order::kBroken) return break_partition(key, text);
  Call call;
  {
    std::unique_lock lock(mutex_);
    const auto found = calls_.find(key);
    if (found == calls_.end()) {
      const auto given_up = given_up_.extract(key);
      lock.unlock();
      if (order == Order::kGo && !given_up.empty()) tell_failed(given_up.mapped(), kNoAnswer);
      return;
    }
    call = found->second;
    if (order == Order::kReport) found->second.reported = true;
    if (order == Order::kGo) {
      found->second.fail = nullptr;  // from now on it ends by itself
      const auto broken = broken_.find(call.arrival.partition);
      if (broken != broken_.end()) call.running->stop(after_failure(call, broken->second));
    }
    if (order == Order::kFail && call.fail) calls_.erase(found);
  }
  if (order == Order::kGo) return call.go(arena_ + offset);
  if (order == Order::kReport) return threads::publish("purlin: " + text);
  end(call, text);
}

void Domain::end(const Call& call, const std::string& why) {
  threads::publish("purlin: " + why);
  threads::end_run(call.arrival.run, why);
  call.running->stop(why);
  if (call.fail) call.fail(why);
}

// What has been told to go may have to wait for calls before it: it must not start any more.
void Domain::break_partition(const std::string& partition, const std::string& why) {
  std::lock_guard lock(mutex_);
  broken_.emplace(partition, why);
  for (const auto& [_, call] : calls_)
    if (!call.fail && call.arrival.partition == partition)
      call.running->stop(after_failure(call, why));
}

void Domain::left(const std::string& key, const std::string& error) {
  Arrival arrival;
  {
    std::lock_guard lock(mutex_);
    const auto found = calls_.find(key);
    if (found == calls_.end() || std::exchange(found->second.left, true)) return;
    arrival = found->second.arrival;
  }
  threads::publish("purlin: " + error);
  threads::end_run(arrival.run, error);
  break_partition(arrival.partition, error);
  if (coordinator_ != nullptr)
    coordinator_->failed(0, key, arrival.partition, arrival.run, error);
  else
    tell_failed(arrival, error);
}

void Domain::tell_failed(const Arrival& arrival, const std::string& why) {
  Message message = begin(Kind::kFailed);
  link_.send(0, message.put(arrival.key).put(arrival.partition).put(arrival.run).put(why));
}

// Process 0 ends calls that wait too long, unless it is stopped or busy itself.
void Domain::look() {
  std::vector<Call> slow, late;
  {
    std::lock_guard lock(mutex_);
    for (auto at = calls_.begin(); at != calls_.end();) {
      Call& call = at->second;
      const std::chrono::duration<double> since = Clock::now() - call.since;
      const double seconds = since.count() - kAnswerSeconds, budget_s = call.arrival.budget_s;
      if (call.fail && budget_s > 0 && seconds > budget_s) {
        given_up_.emplace(at->first, call.arrival);
        late.push_back(std::move(call));
        at = calls_.erase(at);
        continue;
      }
      if (call.fail && seconds > call.arrival.slow_s && !std::exchange(call.reported, true))
        slow.push_back(call);
      ++at;
    }
  }
  for (const Call& call : slow)
    threads::publish("purlin: slow: " + call.arrival.what + ": " + kNoAnswer);
  for (const Call& call : late) end(call, "gave up: " + call.arrival.what + ": " + kNoAnswer);
}

void Domain::finish(const std::string& key) {
  std::lock_guard lock(mutex_);
  calls_.erase(key);
}

}  // namespace purlin::shm
