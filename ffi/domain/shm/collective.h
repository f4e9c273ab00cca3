// Runs a collective whose ranks are devices of several processes.
#pragma once

#include <cstdint>
#include <memory>

#include "domain/site.h"
#include "domain/threads/meeting.h"

namespace purlin::shm {

// What tells one call from others, in the same way in all processes.
struct Identity {
  int64_t instance = 0;  // among the custom calls of an executable that look alike
  int64_t run = 0;
  int64_t occurrence = 0;  // of the call in the run
  bool cached = false;     // whether the program may have come out of a cache
};

// Takes a meeting of all ranks of this process, and completes their promises. Does not wait. `site`
// must live until then. Throws where the processes have not been joined.
void run(const Site& site, const Identity& identity, std::shared_ptr<threads::Meeting> meeting);

}  // namespace purlin::shm
