// The domain of CPU devices that belong to several processes of one host.
#include "domain/shm/domain.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <thread>
#include <utility>

#include "domain/threads/room.h"

namespace purlin::shm {
namespace {

using Clock = Coordinator::Clock;

Domain* the_domain = nullptr;

enum class Kind : int64_t { kHello, kArrive, kFailed, kOrder, kEnded };

Message begin(Kind kind) { return std::move(Message().put(static_cast<int64_t>(kind))); }

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
  message.put(static_cast<int64_t>(a.slow_s * 1e3)).put(static_cast<int64_t>(a.budget_s * 1e3));
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

std::string after_failure(const Domain::Call& call, const std::string& why) {
  return call.arrival.what + ": an earlier collective of these ranks failed: " + why;
}

}  // namespace

bool Running::gone(int rank) const {
  return stopped_.load(std::memory_order_acquire) || domain_.ended(process_of_rank_[rank]);
}

std::string Running::why(int rank) const {
  std::lock_guard lock(mutex_);
  if (!why_.empty()) return why_;
  return "rank " + std::to_string(rank) + " is gone: process " +
         std::to_string(process_of_rank_[rank]) + " has ended during the collective";
}

std::string Running::late(int rank, double seconds) const {
  return "gave up: rank " + std::to_string(rank) + " (process " +
         std::to_string(process_of_rank_[rank]) + ") has not gone on with the collective for " +
         std::to_string(seconds).substr(0, 5) +
         " s. Look at what its process does, or raise PURLIN_TIMEOUT_S";
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

Domain::Domain(int process, int count) : process_(process), count_(count), ended_(count) {}

Domain* Domain::running() { return the_domain; }

void Domain::start(int process, int count, const std::string& name, const std::string& token,
                   int64_t arena_bytes) {
  if (the_domain != nullptr) return;
  auto* domain = new Domain(process, count);  // lives as long as the process
  if (process == 0)
    domain->lead(name, token, arena_bytes);
  else
    domain->follow(name, token);
  the_domain = domain;
}

void Domain::lead(const std::string& name, const std::string& token, int64_t arena_bytes) {
  arena_fd_ = memfd_create("purlin", MFD_CLOEXEC);
  if (arena_fd_ < 0 || ftruncate(arena_fd_, arena_bytes) != 0)
    throw std::runtime_error(std::string("no shared memory: ") + std::strerror(errno));
  arena_bytes_ = arena_bytes;
  arena_ = map_arena(arena_fd_, arena_bytes);
  coordinator_ = std::make_unique<Coordinator>(
      [this](int process, Order order, const std::string& key, int64_t offset,
             const std::string& text) {
        if (process == 0) return obey(order, key, offset, text);
        Message message = begin(Kind::kOrder);
        message.put(static_cast<int64_t>(order)).put(key).put(offset).put(text);
        std::shared_ptr<Socket> to;
        {
          std::lock_guard lock(sockets_mutex_);
          to = sockets_[process];
        }
        if (to != nullptr) to->send(message);  // who is gone is noticed by its reader
      },
      arena_bytes);
  const int listener = listen_at(name);
  std::thread([this, listener, token] {
    for (int fd; (fd = accept_from(listener)) >= 0;)
      std::thread([this, fd, token] { welcome(fd, token); }).detach();
  }).detach();
  std::thread([this] {
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(100)))
      coordinator_->look(Clock::now());
  }).detach();
}

// Serves one of the other processes for as long as it lives.
void Domain::welcome(int fd, const std::string& token) {
  auto socket = std::make_shared<Socket>(fd);
  const int process = greet(*socket, token);
  if (process < 0) return;
  {
    std::lock_guard lock(sockets_mutex_);
    if (!sockets_.emplace(process, socket).second) return;
  }
  if (socket->send(begin(Kind::kHello).put(arena_bytes_)) && socket->send_fd(arena_fd_))
    serve(process, *socket);
  ended_[process].store(true, std::memory_order_release);
  std::vector<std::shared_ptr<Socket>> others;
  {
    std::lock_guard lock(sockets_mutex_);
    sockets_.erase(process);
    for (const auto& [_, other] : sockets_) others.push_back(other);
  }
  for (const auto& other : others) other->send(begin(Kind::kEnded).put(process));
  coordinator_->ended(process);
}

// The number of the process at the other end; -1 for a stranger.
int Domain::greet(Socket& socket, const std::string& token) const {
  Message message;
  if (!socket.is_same_user() || !socket.receive(&message)) return -1;
  try {
    if (static_cast<Kind>(message.number()) != Kind::kHello || message.text() != token) return -1;
    const int64_t process = message.number();
    return process >= 1 && process < count_ ? static_cast<int>(process) : -1;
  } catch (const std::exception&) {
    return -1;
  }
}

void Domain::serve(int process, Socket& socket) {
  Message message;
  try {
    while (socket.receive(&message)) {
      if (static_cast<Kind>(message.number()) == Kind::kArrive) {
        coordinator_->arrive(unpack(message, process));
        continue;
      }
      const std::string key = message.text(), partition = message.text();
      const int64_t run = message.number();
      coordinator_->failed(process, key, partition, run, message.text());
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "purlin: process %d: %s\n", process, error.what());
  }
}

void Domain::follow(const std::string& name, const std::string& token) {
  const int fd = connect_to(name);
  if (fd < 0)
    throw std::runtime_error("process 0 does not answer at " + name + ": " + std::strerror(errno));
  leader_ = std::make_shared<Socket>(fd);
  Message message;
  if (!leader_->is_same_user() ||
      !leader_->send(begin(Kind::kHello).put(token).put(int64_t{process_})) ||
      !leader_->receive(&message))
    throw std::runtime_error("process 0 refused the connection: another user, or another job");
  message.number();
  arena_bytes_ = message.number();
  arena_fd_ = leader_->receive_fd();
  if (arena_fd_ < 0) throw std::runtime_error("process 0 sent no shared memory");
  arena_ = map_arena(arena_fd_, arena_bytes_);
  std::thread([this] { read_leader(); }).detach();
}

void Domain::read_leader() {
  Message message;
  while (leader_->receive(&message)) {
    if (static_cast<Kind>(message.number()) == Kind::kEnded) {
      ended_[message.number()].store(true, std::memory_order_release);
      continue;
    }
    const auto order = static_cast<Order>(message.number());
    const std::string key = message.text();
    const int64_t offset = message.number();
    obey(order, key, offset, message.text());
  }
  leader_is_gone();
}

void Domain::leader_is_gone() {
  ended_[0].store(true, std::memory_order_release);
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
  bool twice;
  {
    std::lock_guard lock(mutex_);
    twice = calls_.count(arrival.key) != 0;
    if (!twice) calls_[arrival.key] = std::move(call);
  }
  if (twice)
    return call.fail(arrival.what + ": two calls at the same time that nothing tells apart");
  if (process_ == 0)
    coordinator_->arrive(arrival);
  else if (!leader_->send(pack(arrival)))
    leader_is_gone();
}

void Domain::obey(Order order, const std::string& key, int64_t offset, const std::string& text) {
  if (order == Order::kReport) return threads::publish("purlin: " + text);
  if (order == Order::kBroken) return break_partition(key, text);
  Call call;
  {
    std::lock_guard lock(mutex_);
    const auto found = calls_.find(key);
    if (found == calls_.end()) return;
    call = found->second;
    if (order == Order::kGo) {
      found->second.fail = nullptr;  // from now on it ends by itself
      const auto broken = broken_.find(call.arrival.partition);
      if (broken != broken_.end()) call.running->stop(after_failure(call, broken->second));
    }
    if (order == Order::kFail && call.fail) calls_.erase(found);
  }
  if (order == Order::kGo) return call.go(arena_ + offset);
  threads::publish("purlin: " + text);
  threads::end_run(call.arrival.run, text);
  call.running->stop(text);
  if (call.fail) call.fail(text);
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
  if (process_ == 0)
    coordinator_->failed(0, key, arrival.partition, arrival.run, error);
  else
    leader_->send(begin(Kind::kFailed).put(key).put(arrival.partition).put(arrival.run).put(error));
}

void Domain::finish(const std::string& key) {
  std::lock_guard lock(mutex_);
  calls_.erase(key);
}

}  // namespace purlin::shm
