// How the ranks of a benchmark start: as threads, or as processes that fail together.
#pragma once

#include <cuda_runtime.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>
#include <vector>

namespace purlin::bench {

// The number of GPUs, asked for in a process of its own: one that has used CUDA cannot fork.
inline int count_devices() {
  const pid_t child = fork();
  if (child == 0) {
    int count = 0;
    _exit(cudaGetDeviceCount(&count) == cudaSuccess ? count : 0);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 0;
  return WEXITSTATUS(status);
}

// Runs `work` for each rank in a process; when one of them fails the others are ended, who would
// wait for it.
template <class Work>
int in_processes(int world, const Work& work) {
  std::vector<pid_t> ranks;
  for (int r = 0; r < world; ++r) {
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      work(r);
      std::_Exit(0);
    }
    ranks.push_back(child);
  }
  int status = 0;
  for (pid_t ended; (ended = wait(&status)) > 0;) {
    if (status == 0) continue;
    for (pid_t rank : ranks)
      if (rank != ended) kill(rank, SIGKILL);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
  }
  return 0;
}

template <class Work>
int in_threads(int world, const Work& work) {
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) threads.emplace_back(work, r);
  for (std::thread& thread : threads) thread.join();
  return 0;
}

}  // namespace purlin::bench
