// Runs one collective of virtual CPU devices once all ranks of its group have arrived.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "domain/site.h"
#include "snac/call.h"
#include "snac/counts.h"
#include "snac/host_block.h"

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
  int expected = 0;  // ranks of this process
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

// The same for ranks of several processes, which share windows of kCapacity from `windows` on.
// Calls start in the order in which this is called, and call `after` before they complete their
// promises.
void run_shared(const Site& site, std::shared_ptr<Meeting> meeting, char* windows,
                std::shared_ptr<Peers> peers, std::function<void()> after);

// Completes the promise of each rank of this process, from tasks of their own.
void complete(const std::shared_ptr<Meeting>& meeting, const std::string& error);

// Bytes of one rank's window.
int64_t window_bytes(int world);

}  // namespace purlin::threads
