// Threads of our own for work that outlives an XLA handler, growing as tasks may block.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

namespace purlin::threads {

// A task may block (a completed promise runs the rest of a device's program, which may reach a
// blocking operation), so a queued task never waits for a busy thread: the pool grows instead. The
// number of threads is bounded by the number of tasks that are in flight at one time.
class Pool {
 public:
  using Task = std::function<void()>;

  // Never destroyed: its threads live as long as the process.
  static Pool& instance();

  void post(Task task);

  // Enqueues all tasks at once, so that each of them has a thread and they may wait for each other.
  void post_gang(std::vector<Task> tasks);

 private:
  void grow_locked();
  void loop();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> queue_;
  size_t idle_ = 0;
};

// Runs gangs one after another in the order they came: the gangs share windows.
class GangQueue {
 public:
  void post(std::vector<Pool::Task> tasks, Pool::Task after);

 private:
  struct Gang {
    std::vector<Pool::Task> tasks;
    Pool::Task after;
  };
  void start(Gang gang);
  void finish_one();

  std::mutex mutex_;
  std::deque<Gang> waiting_;
  bool busy_ = false;
};

// Cores that this process may use.
int num_cores();

}  // namespace purlin::threads
