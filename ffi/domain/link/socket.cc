// Messages and file descriptors between processes of one host, over abstract Unix sockets.
#include "domain/link/socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>

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

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

bool Socket::send_all(const char* at, size_t bytes) {
  while (bytes > 0) {
    const ssize_t sent = ::send(fd_.get(), at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    bytes -= static_cast<size_t>(sent);
  }
  return true;
}

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

bool Socket::send_head(const Head& head, int fd) {
  Rights rights(const_cast<Head*>(&head), sizeof head, fd >= 0);
  if (fd >= 0) {
    cmsghdr* first = CMSG_FIRSTHDR(&rights.header);
    first->cmsg_level = SOL_SOCKET;
    first->cmsg_type = SCM_RIGHTS;
    first->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(first), &fd, sizeof fd);
  }
  ssize_t sent;
  do sent = sendmsg(fd_.get(), &rights.header, MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  const auto* rest = reinterpret_cast<const char*>(&head);
  return sent > 0 && send_all(rest + sent, sizeof head - static_cast<size_t>(sent));
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
  std::lock_guard lock(sending_);
  const Head head = {message.bytes().size(), fd >= 0};
  return send_head(head, fd) && send_all(message.bytes().data(), head.bytes);
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

}  // namespace purlin::link
