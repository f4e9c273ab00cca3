// Messages and file descriptors between processes of one host, over abstract Unix sockets: names
// that vanish with their processes.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace purlin::link {

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
  int64_t peek() const { return Message(*this).number(); }
  // What has not been taken of another one.
  Message& append(const Message& rest) {
    bytes_.append(rest.bytes_, rest.at_);
    return *this;
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

// Closes a file descriptor at its end.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  static Descriptor copy_of(int fd);  // throws std::runtime_error
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }  // or -1

 private:
  int fd_;
};

// One end of a connection. Several threads may send, one receives.
//
// Nobody waits for the other end, which may have been stopped: what does not fit into the
// connection is kept, and a thread that lives as long as something is kept sends it on.
class Socket : public std::enable_shared_from_this<Socket> {
 public:
  static std::shared_ptr<Socket> of(int fd) { return std::shared_ptr<Socket>(new Socket(fd)); }
  ~Socket();
  Socket(const Socket&) = delete;

  // False where the other end is gone. A descriptor may go with a message; the sender keeps its
  // own.
  bool send(const Message& message, int fd = -1);
  bool receive(Message* message, Descriptor* descriptor = nullptr);

  bool is_same_user() const;

 private:
  struct Head {
    uint64_t bytes;
    uint64_t descriptors;  // 0 or 1, which comes with this head
  };
  struct Outgoing {
    std::string bytes;
    size_t sent;
    Descriptor descriptor;
  };
  explicit Socket(int fd);
  bool send_some(const std::string& bytes, size_t* sent, int fd);
  void send_kept();
  bool receive_all(char* at, size_t bytes);
  bool receive_head(Head* head, Descriptor* descriptor);

  const Descriptor fd_;
  std::mutex sending_;
  std::deque<Outgoing> kept_;  // with a thread that sends it, unless empty
  bool gone_ = false;
};

// A listening socket called `name`; throws std::runtime_error.
int listen_at(const std::string& name);
// The next connection to it.
int accept_from(int listener);
// A connection to `name`, or -1.
int connect_to(const std::string& name);

}  // namespace purlin::link
