// Connections between processes: no sender waits for a receiver, and no fork keeps one open.
//
//   link_test MESSAGES
//
// Ends with 0, or with what was wrong.
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "domain/link/socket.h"
#include "domain/shm/runs.h"

namespace purlin {
namespace {

using link::Descriptor;
using link::Message;
using link::Socket;

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

struct Pair {
  std::shared_ptr<Socket> one, other;
  Pair() {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no sockets");
    one = Socket::of(ends[0]), other = Socket::of(ends[1]);
  }
};

ino_t file_of(int fd) {
  struct stat about;
  require(fstat(fd, &about) == 0, "a descriptor is not open");
  return about.st_ino;
}

bool carries(int i) { return i % 100 == 7; }

// Far more than the system keeps for a connection, to an end that does not read yet.
void nobody_waits(int messages) {
  Pair pair;
  const Descriptor file(open("/dev/zero", O_RDONLY | O_CLOEXEC));
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < messages; ++i) {
    const Message message = std::move(Message().put(int64_t{i}).put(std::string(i % 3000, 'x')));
    require(pair.one->send(message, carries(i) ? file.get() : -1), "a message was refused");
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  require(seconds.count() < 5, "sending waited for the other end");
  for (int i = 0; i < messages; ++i) {
    Message message;
    Descriptor came;
    require(pair.other->receive(&message, &came), "a message is missing");
    require(message.number() == i, "messages changed their order");
    require(message.text() == std::string(i % 3000, 'x'), "a message changed");
    require((came.get() >= 0) == carries(i), "a descriptor went with another message");
    if (carries(i)) require(file_of(came.get()) == file_of(file.get()), "another descriptor");
  }
  pair.other.reset();
  bool taken = true;
  for (int i = 0; taken && i < 1000; ++i) {
    taken = pair.one->send(Message().put(int64_t{i}));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  require(!taken, "nothing tells the sender that the other end is gone");
}

// While one thread reads, several write more than fits.
void many_senders(int messages) {
  Pair pair;
  constexpr int kSenders = 4;
  std::vector<std::thread> senders;
  for (int64_t s = 0; s < kSenders; ++s)
    senders.emplace_back([&pair, s, messages] {
      for (int64_t i = 0; i < messages; ++i)
        require(pair.one->send(Message().put(s).put(i).put(std::string(500, 'y'))), "refused");
    });
  int64_t next[kSenders] = {};
  for (int i = 0; i < kSenders * messages; ++i) {
    Message message;
    require(pair.other->receive(&message), "a message of several senders is missing");
    const int64_t sender = message.number();
    require(message.number() == next[sender]++, "messages of a sender changed their order");
  }
  for (std::thread& sender : senders) sender.join();
}

void forks_hold_nothing() {
  Pair pair;
  const pid_t child = fork();
  if (child == 0) {
    sleep(20);
    _exit(0);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  pair.one.reset();
  Message message;
  require(!pair.other->receive(&message), "a message of nobody");
  require(waitpid(child, nullptr, WNOHANG) == 0, "the fork kept the connection open");
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

// Names of runs: process 1 took two programs out of a cache.
void runs_of_cached_programs() {
  shm::Runs runs;
  constexpr int64_t kA = 1'000'000, kB = 9'000'000, kShiftA = 5000, kShiftB = -70'000;
  require(runs.common(1, "a", kA) == kA, "a name for nothing");
  runs.learn(1, "a", kA, kA + kShiftA);
  runs.learn(1, "b", kB, kB + kShiftB);
  for (int64_t i = 0; i < 100; ++i) {
    require(runs.common(1, "a", kA + i) == kA + i + kShiftA, "a run is called otherwise");
    require(runs.common(0, "a", kA + i) == kA + i, "a run of another process");
  }
  // A collective that was not in the last hundred runs, by its place and by the run's others.
  require(runs.common(1, "b", kB + 99) == kB + 99 + kShiftB, "a program that ran long ago");
  require(runs.common(1, "rare", kA + 99) == kA + 99 + kShiftA, "another place of the run");
  require(runs.common(1, "rare", kA + 199) == kA + 199 + kShiftA, "a rare collective");
  require(runs.common(1, kA + 200) == kA + 200 + kShiftA, "a run without a place");
  require(runs.common(1, "new", kA + 999) == kA + 999, "a run that nothing tells of");
}

}  // namespace
}  // namespace purlin

int main(int count, char** values) {
  if (count != 2) {
    std::fprintf(stderr, "usage: link_test MESSAGES\n");
    return 2;
  }
  const int messages = std::atoi(values[1]);
  purlin::forks_hold_nothing();
  purlin::nobody_waits(messages);
  purlin::many_senders(messages);
  purlin::runs_of_cached_programs();
  std::printf("all right\n");
}
