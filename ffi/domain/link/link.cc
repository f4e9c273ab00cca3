// Connects the processes of one host: messages between any two, and word of those that have ended.
#include "domain/link/link.h"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <utility>

namespace purlin::link {

void Link::join(const std::string& name, const std::string& token, double seconds) {
  if (process_ == 0) {
    std::thread([this, listener = listen_at(name), token] {
      for (;;)
        std::thread([this, fd = accept_from(listener), token] { welcome(fd, token); }).detach();
    }).detach();
    return;
  }
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  int fd = connect_to(name);
  for (; fd < 0 && Clock::now() < end; fd = connect_to(name))
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (fd < 0)
    throw std::runtime_error("process 0 does not answer at " + name + ": " + std::strerror(errno));
  auto leader = Socket::of(fd);
  if (!leader->is_same_user() || !leader->send(Message().put(token).put(int64_t{process_})))
    throw std::runtime_error("process 0 refused the connection: another user, or another job");
  sockets_[0] = leader;
  std::thread([this] { read_leader(); }).detach();
}

// Serves one of the other processes for as long as it lives.
void Link::welcome(int fd, const std::string& token) {
  auto socket = Socket::of(fd);
  const int process = greet(*socket, token);
  if (process < 0) return;
  {
    std::lock_guard lock(mutex_);
    if (!sockets_.emplace(process, socket).second) return;
  }
  listener_.joined(process);
  serve(process, *socket);
  ended_[process].store(true, std::memory_order_release);
  {
    std::lock_guard lock(mutex_);
    sockets_.erase(process);
  }
  for (int other = 1; other < count_; ++other) pass(process, other, Message().put(kNobody), -1);
  listener_.ended(process);
}

// The number of the process at the other end; -1 for a stranger.
int Link::greet(Socket& socket, const std::string& token) const {
  Message message;
  if (!socket.is_same_user() || !socket.receive(&message)) return -1;
  try {
    if (message.text() != token) return -1;
    const int64_t process = message.number();
    return process >= 1 && process < count_ ? static_cast<int>(process) : -1;
  } catch (const std::exception&) {
    return -1;
  }
}

void Link::serve(int process, Socket& socket) {
  Message message;
  Descriptor descriptor;
  while (socket.receive(&message, &descriptor))
    deal_with(process, [&] {
      const auto to = static_cast<int>(message.number());
      if (to == 0)
        listener_.receive(process, message, std::move(descriptor));
      else
        pass(process, to, message, descriptor.get());
    });
}

// A message that cannot be dealt with is no end: what waits for it ends at its timeout.
template <class Deal>
void Link::deal_with(int from, Deal deal) const {
  try {
    deal();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "purlin: process %d: lost a message of process %d: %s\n", process_, from,
                 error.what());
  }
}

std::shared_ptr<Socket> Link::socket_of(int process) {
  std::lock_guard lock(mutex_);
  const auto found = sockets_.find(process);
  return found == sockets_.end() ? nullptr : found->second;
}

// From process 0 to another.
bool Link::pass(int from, int to, const Message& message, int fd) {
  const auto socket = socket_of(to);
  return socket != nullptr && socket->send(Message().put(int64_t{from}).append(message), fd);
}

bool Link::send(int to, const Message& message, int fd) {
  if (process_ == 0) return pass(0, to, message, fd);
  return !has_ended(to) && socket_of(0)->send(Message().put(int64_t{to}).append(message), fd);
}

void Link::send_others(const Message& message, int fd) {
  for (int other = 0; other < count_; ++other)
    if (other != process_) send(other, message, fd);
}

void Link::read_leader() {
  Message message;
  Descriptor descriptor;
  while (socket_of(0)->receive(&message, &descriptor))
    deal_with(0, [&] {
      const auto from = static_cast<int>(message.number());
      if (message.peek() != kNobody) return listener_.receive(from, message, std::move(descriptor));
      ended_[from].store(true, std::memory_order_release);
      listener_.ended(from);
    });
  ended_[0].store(true, std::memory_order_release);
  listener_.ended(0);
}

}  // namespace purlin::link
