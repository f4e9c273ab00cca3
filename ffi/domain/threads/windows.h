// The windows of ranks that are threads of one process.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "atom/cpu.h"
#include "snac/call.h"

namespace purlin::threads {

inline constexpr Capacity kCapacity = {16384, 0, 4 << 20};

// One window for each exact partition of the devices into groups: call sites of one partition share
// it, and two partitions never do. Windows are never freed.
class Windows {
 public:
  // Fills call.window for group `group` of `partition` (all groups, one after another). Throws
  // std::bad_alloc.
  void attach(const std::vector<int64_t>& partition, int group, Call<CpuAtom::Packet>& call);

 private:
  using Key = std::pair<std::vector<int64_t>, std::pair<int, int>>;  // partition, (world, group)

  std::mutex mutex_;
  std::map<Key, std::vector<char*>> bases_;
};

}  // namespace purlin::threads
