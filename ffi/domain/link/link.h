// Connects the processes of one host: messages between any two, and word of those that have ended.
//
// All others are connected to process 0, which passes on what they send each other. Nothing is left
// when they end, however they do.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "domain/link/socket.h"

namespace purlin::link {

// What a link tells, from threads of its own; the messages of a process come in their order.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void joined(int process) = 0;  // tells process 0 alone
  virtual void receive(int from, Message& message, Descriptor descriptor) = 0;
  virtual void ended(int process) = 0;
};

class Link {
 public:
  // Of the processes 0 .. count - 1 that say the same name and token.
  Link(int process, int count, Listener& listener)
      : process_(process), count_(count), listener_(listener), ended_(count) {}

  // The others wait for process 0 for so long. Throws std::runtime_error. The link must then live
  // as long as the process.
  void join(const std::string& name, const std::string& token, double seconds);

  // False where the other has ended. A descriptor may go with the message.
  bool send(int to, const Message& message, int fd = -1);
  void send_others(const Message& message, int fd = -1);

  bool has_ended(int process) const { return ended_[process].load(std::memory_order_acquire); }
  int process() const { return process_; }
  int count() const { return count_; }

 private:
  static constexpr int kNobody = -1;  // "has ended", of the sender

  void welcome(int fd, const std::string& token);
  int greet(Socket& socket, const std::string& token) const;
  void serve(int process, Socket& socket);
  template <class Deal>
  void deal_with(int from, Deal deal) const;
  bool pass(int from, int to, const Message& message, int fd);
  std::shared_ptr<Socket> socket_of(int process);
  void read_leader();

  const int process_, count_;
  Listener& listener_;
  std::vector<std::atomic<bool>> ended_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<Socket>> sockets_;  // of process 0 to the others, or to process 0
};

}  // namespace purlin::link
