// Which runs of a program are the same in different processes.
//
// XLA numbers the runs of an executable from a fingerprint of it on. The fingerprint is the same in
// all processes, unless some of them took the executable out of a compilation cache: then the
// numbers of one differ by the same amount in every run.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <string>

namespace purlin::shm {

class Runs {
 public:
  // What all processes call a run that `process` knows as `run`.
  int64_t common(int process, int64_t run) {
    Shifts& shifts = known_[process].shifts;
    const auto at = find(shifts, run);
    return at == shifts.end() ? run : run + at->second;
  }
  // The same when the run comes to `place`. One that is far from all others may be of a program
  // that has not run for long, and came there before.
  int64_t common(int process, const std::string& place, int64_t run) {
    Known& known = known_[process];
    if (known.shifts.empty()) return run;
    int64_t shift;
    if (const auto at = find(known.shifts, run); at != known.shifts.end()) {
      shift = known.of_place[place] = at->second;
      if (run <= at->first) return run + shift;
    } else if (const auto before = known.of_place.find(place); before != known.of_place.end()) {
      shift = before->second;
    } else {
      return run;
    }
    remember(known.shifts, run, shift);
    return run + shift;
  }

  // From now on that run and those after it are called `name`, `name` + 1 and so on.
  void learn(int process, const std::string& place, int64_t run, int64_t name) {
    Known& known = known_[process];
    auto& shifts = known.shifts;
    for (auto at = find(shifts, run); at != shifts.end(); at = find(shifts, run)) shifts.erase(at);
    known.of_place.erase(place);
    if (name == run) return;
    remember(shifts, run, name - run);
    known.of_place[place] = name - run;
  }

 private:
  using Shifts = std::map<int64_t, int64_t>;  // last run of an executable: what to add
  struct Known {
    Shifts shifts;  // one entry for each amount
    std::map<std::string, int64_t> of_place;
  };
  static constexpr int64_t kNear = 16;  // runs of one executable that are on their way

  static void remember(Shifts& shifts, int64_t run, int64_t shift) {
    for (auto at = shifts.begin(); at != shifts.end();)
      at = at->second == shift ? shifts.erase(at) : std::next(at);
    shifts[run] = shift;
  }

  static Shifts::iterator find(Shifts& shifts, int64_t run) {
    const auto at = shifts.lower_bound(run - kNear);
    return at != shifts.end() && at->first <= run + kNear ? at : shifts.end();
  }

  std::map<int, Known> known_;  // of each process
};

}  // namespace purlin::shm
