// Messages and file descriptors between processes of one host, over abstract Unix sockets: names
// that vanish with their processes.
#pragma once

#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace purlin::shm {

// A message as bytes: numbers and texts in the order in which they were put.
class Message {
 public:
  Message() = default;
  explicit Message(std::string bytes) : bytes_(std::move(bytes)) {}

  Message& put(int64_t value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Message& put(const std::string& text) {
    put(static_cast<int64_t>(text.size()));
    bytes_ += text;
    return *this;
  }
  int64_t number() {
    int64_t value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  std::string text() {
    const int64_t size = number();
    return {take(size), static_cast<size_t>(size)};
  }
  const std::string& bytes() const { return bytes_; }

 private:
  const char* take(int64_t size) {
    if (size < 0 || size > static_cast<int64_t>(bytes_.size() - at_))
      throw std::runtime_error("a message ends too early");
    at_ += size;
    return bytes_.data() + at_ - size;
  }

  std::string bytes_;
  size_t at_ = 0;
};

// One end of a connection. Several threads may send, one receives.
class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket();
  Socket(const Socket&) = delete;

  // False where the other end is gone.
  bool send(const Message& message);
  bool receive(Message* message);
  bool send_fd(int fd);
  int receive_fd();  // or -1

  bool is_same_user() const;

 private:
  bool send_all(const char* at, size_t bytes);
  bool receive_all(char* at, size_t bytes);

  const int fd_;
  std::mutex sending_;
};

// A listening socket called `name`; throws std::runtime_error.
int listen_at(const std::string& name);
// The next connection to it.
int accept_from(int listener);
// A connection to `name`, or -1.
int connect_to(const std::string& name);

}  // namespace purlin::shm
