// Messages and file descriptors between processes of one host, over abstract Unix sockets.
#include "domain/shm/socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>

namespace purlin::shm {
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

}  // namespace

Socket::~Socket() { close(fd_); }

bool Socket::send_all(const char* at, size_t bytes) {
  while (bytes > 0) {
    const ssize_t sent = ::send(fd_, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    bytes -= static_cast<size_t>(sent);
  }
  return true;
}

bool Socket::receive_all(char* at, size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = recv(fd_, at, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

bool Socket::send(const Message& message) {
  std::lock_guard lock(sending_);
  const uint64_t size = message.bytes().size();
  return send_all(reinterpret_cast<const char*>(&size), sizeof size) &&
         send_all(message.bytes().data(), size);
}

bool Socket::receive(Message* message) {
  constexpr uint64_t kMost = 1 << 20;
  uint64_t size = 0;
  if (!receive_all(reinterpret_cast<char*>(&size), sizeof size) || size > kMost) return false;
  std::string bytes(size, '\0');
  if (!receive_all(bytes.data(), size)) return false;
  *message = Message(std::move(bytes));
  return true;
}

bool Socket::send_fd(int fd) {
  std::lock_guard lock(sending_);
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  cmsghdr* rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  return sendmsg(fd_, &header, MSG_NOSIGNAL) == 1;
}

int Socket::receive_fd() {
  char byte = 0;
  iovec data{&byte, 1};
  int fd = -1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  if (recvmsg(fd_, &header, MSG_CMSG_CLOEXEC) != 1) return -1;
  const cmsghdr* rights = CMSG_FIRSTHDR(&header);
  if (rights == nullptr || rights->cmsg_type != SCM_RIGHTS) return -1;
  std::memcpy(&fd, CMSG_DATA(rights), sizeof fd);
  return fd;
}

bool Socket::is_same_user() const {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(fd_, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == getuid();
}

int listen_at(const std::string& name) {
  const int fd = new_socket();
  const Address address = address_of(name);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address.at), address.size) != 0 ||
      listen(fd, SOMAXCONN) != 0)
    throw std::runtime_error("cannot listen at " + name + ": " + std::strerror(errno));
  return fd;
}

int accept_from(int listener) {
  for (;;) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd >= 0 || errno != EINTR) return fd;
  }
}

int connect_to(const std::string& name) {
  const int fd = new_socket();
  const Address address = address_of(name);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address.at), address.size) == 0) return fd;
  close(fd);
  return -1;
}

}  // namespace purlin::shm
