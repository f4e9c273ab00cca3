// Messages and file descriptors between processes of one host, over abstract Unix sockets.
#include "domain/link/socket.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <set>
#include <thread>

namespace purlin::link {
namespace {

struct Address {
  sockaddr_un at{};
  socklen_t size;
};

// Abstract: the name begins with a zero byte, and no file has it.
Address address_of(const std::string& name) {
  Address address;
  address.at.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof address.at.sun_path) throw std::runtime_error("name too long");
  std::memcpy(address.at.sun_path + 1, name.data(), name.size());
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

int new_socket() {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) throw std::runtime_error(std::string("no Unix socket: ") + std::strerror(errno));
  return fd;
}

// A process that is forked off must not hold the connections of its parent: the others would not
// notice when the parent ends. It gets a file that is no socket in the place of each.
class Forks {
 public:
  static Forks& instance() {
    static auto* all = new Forks();  // outlives the threads
    return *all;
  }
  void keep(int fd) {
    std::lock_guard lock(mutex_);
    sockets_.insert(fd);
  }
  void forget(int fd) {
    std::lock_guard lock(mutex_);
    sockets_.erase(fd);
  }

 private:
  Forks() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] {
                     for (int fd : instance().sockets_) dup2(instance().nothing_.get(), fd);
                     instance().mutex_.unlock();
                   });
  }

  std::mutex mutex_;
  std::set<int> sockets_;
  const Descriptor nothing_{open("/dev/null", O_RDWR | O_CLOEXEC)};
};

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

Descriptor Descriptor::copy_of(int fd) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw std::runtime_error(std::string("no descriptor: ") + std::strerror(errno));
  return Descriptor(copy);
}

Socket::Socket(int fd) : fd_(fd) { Forks::instance().keep(fd); }

Socket::~Socket() { Forks::instance().forget(fd_.get()); }

bool Socket::receive_all(char* at, size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = recv(fd_.get(), at, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

// Room for the one descriptor that may come with a head.
struct Rights {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec data;
  msghdr header{};

  Rights(void* at, size_t bytes, bool carries) : data{at, bytes} {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    if (!carries) return;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
};

// As much as fits now. A descriptor goes with the first byte. False where the other end is gone.
bool Socket::send_some(const std::string& bytes, size_t* sent, int fd) {
  while (*sent < bytes.size()) {
    const bool carries = fd >= 0 && *sent == 0;
    Rights rights(const_cast<char*>(bytes.data()) + *sent, bytes.size() - *sent, carries);
    if (carries) {
      cmsghdr* first = CMSG_FIRSTHDR(&rights.header);
      first->cmsg_level = SOL_SOCKET;
      first->cmsg_type = SCM_RIGHTS;
      first->cmsg_len = CMSG_LEN(sizeof fd);
      std::memcpy(CMSG_DATA(first), &fd, sizeof fd);
    }
    const ssize_t went = sendmsg(fd_.get(), &rights.header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (went < 0 && errno == EINTR) continue;
    if (went < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    *sent += static_cast<size_t>(went);
  }
  return true;
}

bool Socket::receive_head(Head* head, Descriptor* descriptor) {
  Rights rights(head, sizeof *head, true);
  ssize_t got;
  do got = recvmsg(fd_.get(), &rights.header, MSG_CMSG_CLOEXEC);
  while (got < 0 && errno == EINTR);
  if (got <= 0) return false;
  const cmsghdr* first = CMSG_FIRSTHDR(&rights.header);
  if (first != nullptr && first->cmsg_type == SCM_RIGHTS) {
    int fd;
    std::memcpy(&fd, CMSG_DATA(first), sizeof fd);
    *descriptor = Descriptor(fd);
  }
  return receive_all(reinterpret_cast<char*>(head) + got, sizeof *head - static_cast<size_t>(got));
}

bool Socket::send(const Message& message, int fd) {
  const Head head = {message.bytes().size(), fd >= 0};
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
  bytes += message.bytes();
  std::lock_guard lock(sending_);
  size_t sent = 0;
  const bool is_first = kept_.empty();
  if (!gone_ && is_first) gone_ = !send_some(bytes, &sent, fd);
  if (gone_) return false;
  if (sent == bytes.size()) return true;
  kept_.push_back({std::move(bytes), sent, fd >= 0 ? Descriptor::copy_of(fd) : Descriptor()});
  if (is_first) std::thread([self = shared_from_this()] { self->send_kept(); }).detach();
  return true;
}

void Socket::send_kept() {
  for (;;) {
    pollfd ready = {fd_.get(), POLLOUT, 0};
    poll(&ready, 1, -1);
    std::lock_guard lock(sending_);
    while (!gone_ && !kept_.empty()) {
      Outgoing& next = kept_.front();
      gone_ = !send_some(next.bytes, &next.sent, next.descriptor.get());
      if (next.sent < next.bytes.size()) break;
      kept_.pop_front();
    }
    if (gone_) kept_.clear();
    if (kept_.empty()) return;
  }
}

bool Socket::receive(Message* message, Descriptor* descriptor) {
  constexpr uint64_t kMost = 1 << 20;
  Head head{};
  Descriptor came;
  if (!receive_head(&head, &came) || head.bytes > kMost) return false;
  std::string bytes(head.bytes, '\0');
  if (!receive_all(bytes.data(), head.bytes)) return false;
  *message = Message(std::move(bytes));
  if (head.descriptors > 0 && came.get() < 0) return false;
  if (descriptor != nullptr) *descriptor = std::move(came);
  return true;
}

bool Socket::is_same_user() const {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == getuid();
}

int listen_at(const std::string& name) {
  const int fd = new_socket();
  const Address address = address_of(name);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address.at), address.size) != 0 ||
      listen(fd, SOMAXCONN) != 0)
    throw std::runtime_error("cannot listen at " + name + ": " + std::strerror(errno));
  Forks::instance().keep(fd);
  return fd;
}

int accept_from(int listener) {
  for (;;) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd >= 0) return fd;
    // Out of descriptors or memory, perhaps for a while; or the other end has left.
    if (errno != EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

int connect_to(const std::string& name) {
  const int fd = new_socket();
  const Address address = address_of(name);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address.at), address.size) == 0) return fd;
  close(fd);
  return -1;
}

}  // namespace purlin::link
