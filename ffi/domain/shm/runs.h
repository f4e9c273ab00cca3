// Which runs of a program are the same in different processes.
//
// XLA numbers the runs of an executable from a fingerprint of it on. The fingerprint is the same in
// all processes, unless some of them took the executable out of a compilation cache.
#pragma once

#include <cstdint>
#include <map>

namespace purlin::shm {

class Runs {
 public:
  // What all processes call a run that `process` knows as `run`.
  int64_t common(int process, int64_t run) {
    auto& shifts = shifts_[process];
    const auto at = find(shifts, run);
    if (at == shifts.end()) return run;
    const int64_t shift = at->second;
    if (run > at->first) {
      shifts.erase(at);
      shifts[run] = shift;
    }
    return run + shift;
  }

  // From now on that run and those after it are called `name`, `name` + 1 and so on.
  void learn(int process, int64_t run, int64_t name) {
    auto& shifts = shifts_[process];
    for (auto at = find(shifts, run); at != shifts.end(); at = find(shifts, run)) shifts.erase(at);
    if (name != run) shifts[run] = name - run;
  }

 private:
  using Shifts = std::map<int64_t, int64_t>;  // last run of an executable: what to add
  static constexpr int64_t kNear = 16;        // runs of one executable that are on their way

  static Shifts::iterator find(Shifts& shifts, int64_t run) {
    const auto at = shifts.lower_bound(run - kNear);
    return at != shifts.end() && at->first <= run + kNear ? at : shifts.end();
  }

  std::map<int, Shifts> shifts_;  // of each process
};

}  // namespace purlin::shm
