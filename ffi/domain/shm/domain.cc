// The domain of CPU devices that belong to several processes of one host.
#include "domain/shm/domain.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "domain/threads/room.h"

namespace purlin::shm {
namespace {

using Clock = Coordinator::Clock;

Domain* the_domain = nullptr;

enum class Kind : int64_t { kHello, kArrive, kFailed, kOrder, kEnded };

Message begin(Kind kind) { return std::move(Message().put(static_cast<int64_t>(kind))); }

Message pack(const Arrival& a) {
  Message message = begin(Kind::kArrive);
  message.put(a.key).put(a.arguments).put(a.what).put(a.partition).put(a.window_bytes);
  message.put(static_cast<int64_t>(a.process_of_rank.size()));
  for (int process : a.process_of_rank) message.put(process);
  message.put(static_cast<int64_t>(a.slow_s * 1e3)).put(static_cast<int64_t>(a.budget_s * 1e3));
  return message;
}

Arrival unpack(Message& message, int process) {
  Arrival a;
  a.process = process;
  a.key = message.text(), a.arguments = message.text(), a.what = message.text();
  a.partition = message.text(), a.window_bytes = message.number();
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

}  // namespace

bool Running::gone(int rank) const {
  return stopped_.load(std::memory_order_acquire) || domain_.ended(process_of_rank_[rank]);
}

std::string Running::why(int rank) const {
  std::lock_guard lock(mutex_);
  if (!why_.empty()) return why_;
  return "rank " + std::to_string(rank) + " is gone: process " +
         std::to_string(process_of_rank_[rank]) + " ended during the collective";
}

void Running::stop(const std::string& why) {
  std::lock_guard lock(mutex_);
  why_ = why;
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
  Message message;
  if (!socket->is_same_user() || !socket->receive(&message)) return;
  int process = 0;
  try {
    if (static_cast<Kind>(message.number()) != Kind::kHello || message.text() != token) return;
    process = static_cast<int>(message.number());
    if (process < 1 || process >= count_) return;
    if (!socket->send(begin(Kind::kHello).put(arena_bytes_)) || !socket->send_fd(arena_fd_)) return;
    {
      std::lock_guard lock(sockets_mutex_);
      sockets_[process] = socket;
    }
    while (socket->receive(&message)) {
      if (static_cast<Kind>(message.number()) == Kind::kArrive) {
        coordinator_->arrive(unpack(message, process));
      } else {
        const std::string key = message.text();
        coordinator_->failed(key, message.text());
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "purlin: process %d: %s\n", process, error.what());
  }
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
  {
    std::lock_guard lock(mutex_);
    calls_[arrival.key] = std::move(call);
  }
  if (process_ == 0)
    coordinator_->arrive(arrival);
  else if (!leader_->send(pack(arrival)))
    leader_is_gone();
}

void Domain::obey(Order order, const std::string& key, int64_t offset, const std::string& text) {
  if (order == Order::kReport) return threads::publish("purlin: " + text);
  Call call;
  {
    std::lock_guard lock(mutex_);
    const auto found = calls_.find(key);
    if (found == calls_.end()) return;
    call = found->second;
    if (order == Order::kGo) found->second.fail = nullptr;  // from now on it ends by itself
    if (order == Order::kFail && call.fail) calls_.erase(found);
  }
  if (order == Order::kGo) return call.go(arena_ + offset);
  threads::publish("purlin: " + text);
  call.running->stop(text);
  if (call.fail) call.fail(text);
}

void Domain::finish(const std::string& key, const std::string& error) {
  {
    std::lock_guard lock(mutex_);
    calls_.erase(key);
  }
  if (error.empty()) return;
  if (process_ == 0)
    coordinator_->failed(key, error);
  else
    leader_->send(begin(Kind::kFailed).put(key).put(error));
}

}  // namespace purlin::shm
