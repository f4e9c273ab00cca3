// Runs one collective of virtual CPU devices once all ranks of its group have arrived.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "domain/site.h"
#include "snac/call.h"
#include "snac/counts.h"

namespace purlin::threads {

// Completes one rank's promise; an empty text is success.
using Done = std::function<void(const std::string& error)>;

struct Arrival {
  const char* src[kMaxOperands];
  char* dst[kMaxOperands];
  int64_t row_bytes[kMaxOperands];
  Counted counted;  // of collectives whose counts are data
  Done done;
};

struct Meeting {
  int64_t run = 0;  // of the program
  int group = 0;
  int arrived = 0;
  std::vector<Arrival> ranks;
  std::vector<bool> here;
  std::vector<Plan> plans;
  std::vector<Counts> counts;  // of each rank, once all have arrived
};

// Whether ranks on the host know this reduction.
bool reduces(const char* op, const char* dtype);

// Empty where `site` can run with these plans, else a sentence that says why not.
std::string refuse(const Site& site, const std::vector<Plan>& plans, const Counted& counted);

// Takes a full meeting, moves the bytes, and completes each promise from a task of its own. The
// calling thread helps, and never waits.
void run(const Site& site, std::shared_ptr<Meeting> meeting);

}  // namespace purlin::threads
