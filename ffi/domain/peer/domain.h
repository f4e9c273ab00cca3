// The domain of one process and its GPUs: peer access, one arena on each device, and its windows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "domain/counters.h"
#include "snac/kernels.h"
#include "snac/watch.h"

namespace purlin::peer {

struct Device {
  int ordinal = -1;
  std::string name;
  int capability = 0;  // 90 for sm_90
  int multiprocessors = 0;
  char* arena = nullptr;
  uint64_t* calls = nullptr;  // [row][regime], at the start of the arena
  Limits* limits = nullptr;   // behind the counters
  Report* report = nullptr;   // pinned; `device_report` is the same memory as the device sees it
  Report* device_report = nullptr;
};

// Everything that touches CUDA happens in start(): afterwards nothing is allocated, loaded or set,
// since each of these may wait for a GPU on which a peer's kernel is waiting for us.
class Domain {
 public:
  // Starts on first use. Throws std::runtime_error; a failed start is tried again.
  static Domain& start();
  // The running domain, or null.
  static Domain* running();

  const std::vector<Device>& devices() const { return devices_; }
  const Device& device(int ordinal) const;
  // Whether every device of a group may read every other one.
  bool can_peer(const std::vector<int>& ordinals) const;
  int64_t arena_bytes() const { return arena_bytes_; }
  int64_t arena_used() const;
  // The widest grid that is resident, beside another one of its kind, on all devices: blocks wait
  // for blocks.
  int max_blocks() const { return max_blocks_; }

  // Of each window of a group of `world` ranks.
  static Capacity capacity(int world);

  // Offset of the windows of a partition in every arena. Throws std::runtime_error when it is full.
  int64_t reserve(const std::vector<int64_t>& partition, int world);

  // Fills call.capacity and call.window for a group of device ordinals of `partition` (all groups,
  // one after another). Only arithmetic: no CUDA call. Throws std::runtime_error when the arena is
  // full.
  void attach(const std::vector<int64_t>& partition, int world, const std::vector<int>& ordinals,
              CudaCall& call);

  int64_t calls(int row, int regime) const;
  void set_limits(double slow_s, double budget_s);

 private:
  explicit Domain(int64_t arena_bytes);
  void enable_peers();
  void load_kernels();
  Device open(int ordinal);

  std::vector<Device> devices_;
  std::vector<std::vector<bool>> peers_;  // by position in devices_
  const int64_t arena_bytes_;
  int max_blocks_ = kMaxBlocks;
  mutable std::mutex mutex_;
  int64_t used_ = 0;
  // Of the windows in every arena, by partition and world.
  std::map<std::pair<std::vector<int64_t>, int>, int64_t> offsets_;
};

}  // namespace purlin::peer
