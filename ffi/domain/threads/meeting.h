// Runs one collective of virtual CPU devices once all ranks of its group have arrived.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "layout/collectives.h"
#include "snac/call.h"
#include "snac/regimes.h"

namespace purlin::threads {

// What all ranks of a call site agree on.
struct Site {
  int row = 0;
  std::string reduce;  // operator and element type; empty for copies
  std::string dtype;
  Regime regime = Regime::kMeet;
  int blocks = 0;  // for each rank; 0: by size
  std::vector<int64_t> partition;
};

// Completes one rank's promise; an empty text is success.
using Done = std::function<void(const std::string& error)>;

struct Arrival {
  const char* src[kMaxOperands];
  char* dst[kMaxOperands];
  Done done;
};

struct Meeting {
  int group = 0;
  int arrived = 0;
  std::vector<Arrival> ranks;
  std::vector<bool> here;
  std::vector<Plan> plans;
};

// Empty where `site` can run with these plans, else a sentence that says why not.
std::string refuse(const Site& site, const std::vector<Plan>& plans);

// Takes a full meeting, moves the bytes, and completes each promise from a task of its own. The
// calling thread helps, and never waits.
void run(const Site& site, std::shared_ptr<Meeting> meeting);

}  // namespace purlin::threads
