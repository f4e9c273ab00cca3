// Threads of our own for work that outlives an XLA handler, growing as tasks may block.
#include "domain/threads/pool.h"

#include <sched.h>

#include <atomic>
#include <memory>
#include <thread>
#include <utility>

namespace purlin::threads {

Pool& Pool::instance() {
  static Pool* pool = new Pool;
  return *pool;
}

void Pool::post(Task task) {
  std::vector<Task> one;
  one.push_back(std::move(task));
  post_gang(std::move(one));
}

void Pool::post_gang(std::vector<Task> tasks) {
  const size_t count = tasks.size();
  {
    std::lock_guard lock(mutex_);
    for (Task& task : tasks) queue_.push_back(std::move(task));
    grow_locked();
  }
  for (size_t i = 0; i < count; ++i) wake_.notify_one();
}

void Pool::grow_locked() {
  for (; idle_ < queue_.size(); ++idle_) std::thread([this] { loop(); }).detach();
}

// `idle_` counts threads that will look at the queue next, also those just started.
void Pool::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return !queue_.empty(); });
    Task task = std::move(queue_.front());
    queue_.pop_front();
    --idle_;
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    ++idle_;
  }
}

void GangQueue::post(std::vector<Pool::Task> tasks, Pool::Task after) {
  Gang gang{std::move(tasks), std::move(after)};
  {
    std::lock_guard lock(mutex_);
    if (busy_) {
      waiting_.push_back(std::move(gang));
      return;
    }
    busy_ = true;
  }
  start(std::move(gang));
}

void GangQueue::start(Gang gang) {
  struct Running {
    std::atomic<size_t> left;
    Pool::Task after;
  };
  auto running = std::make_shared<Running>();
  running->left = gang.tasks.size();
  running->after = std::move(gang.after);
  std::vector<Pool::Task> tasks;
  for (Pool::Task& task : gang.tasks)
    tasks.push_back([this, running, task = std::move(task)] {
      task();
      if (running->left.fetch_sub(1) != 1) return;
      running->after();
      finish_one();
    });
  Pool::instance().post_gang(std::move(tasks));
}

void GangQueue::finish_one() {
  Gang next;
  {
    std::lock_guard lock(mutex_);
    if (waiting_.empty()) {
      busy_ = false;
      return;
    }
    next = std::move(waiting_.front());
    waiting_.pop_front();
  }
  start(std::move(next));
}

int num_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace purlin::threads
