// A domain of GPUs that see each other's memory, of one process or of several on a host: an arena
// on each of them, and its windows.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "domain/counters.h"
#include "domain/vmm/neighbours.h"
#include "snac/kernels.h"
#include "snac/watch.h"

namespace purlin::peer {

inline constexpr int64_t kWindowAlign = 4096;

// A GPU of this process.
struct Device {
  int64_t id = -1;  // among all GPUs of the domain
  int ordinal = -1;
  std::string name;
  int capability = 0;  // 90 for sm_90
  int multiprocessors = 0;
  char* arena = nullptr;
  uint64_t* calls = nullptr;  // [row][regime], at the start of the arena
  Limits* limits = nullptr;   // behind the counters
  Report* report = nullptr;   // pinned; `device_report` is the same memory as the device sees it
  Report* device_report = nullptr;
  cudaStream_t side = nullptr;  // waits for no other stream of the device
};

// The ranks of a call, as windows are found for them.
struct Group {
  std::vector<int64_t> partition;  // ids of all groups, one group after another
  int first = 0, world = 1;        // which of them it is
};

// Nothing is allocated, loaded or set after start() and join(), since each of these may wait for a
// GPU on which a peer's kernel is waiting for us. But lend() has others map what XLA has allocated.
class Domain {
 public:
  // The domain of some GPUs of this process, by default of all that it sees; their ids are their
  // ordinals. Starts on first use. Throws std::runtime_error; a failed start is tried again.
  static Domain& start(const std::vector<int>& ordinals = {});
  // The domain of the GPUs of several processes, once they have come. Throws std::runtime_error.
  static Domain& join(const vmm::Joining& joining);
  // The running one for calls in one process, or in several; or null.
  static Domain* running(bool joined);
  // All that run.
  static std::vector<Domain*> all();

  const std::vector<Device>& devices() const { return devices_; }
  const Device& device(int ordinal) const;
  // Whether every device of a group may read every other one.
  bool can_peer(const std::vector<int64_t>& ids) const;
  // Whether arrays may be read where they lie.
  bool lends() const { return neighbours_ == nullptr || neighbours_->lends(); }
  int64_t arena_bytes() const { return arena_bytes_; }
  int64_t arena_used() const;
  // The widest grid that is resident, beside another one of its kind, on all devices: blocks wait
  // for blocks.
  int max_blocks() const { return max_blocks_; }

  // Of each window of a group of `world` ranks.
  static Capacity capacity(int world);

  // Offset of the windows of a partition in every arena; -1 when it is full. Throws
  // std::runtime_error where other processes do not answer.
  int64_t reserve(const std::vector<int64_t>& partition, int world);

  std::string full() const;  // says so

  // Fills call.capacity and call.window. Only arithmetic, once the windows are reserved. Throws
  // std::runtime_error when the arena is full. Returns the number of the group, for reports.
  int32_t attach(const Group& group, CudaCall& call);

  // Where the ranks of a group see an array that one of them has on its GPU: what to add to its
  // addresses, by rank. Throws std::runtime_error where that cannot be found out.
  void lend(int32_t group, const void* array, int64_t (&shift)[kMaxRanks]);
  // This rank does not come to a call that others may wait in: tells them, and ends their waits.
  void fail(int32_t group, const std::string& why);
  // Throws std::runtime_error where a process of the group is gone.
  void check_group(int32_t group) const;
  // "rank 3 (process 1)"
  std::string name_of(int32_t group, int rank) const;
  // What is known of a rank that does not come to a call.
  std::string about(int32_t group, int rank, uint64_t tag, const std::string& text) const;
  void name_site(uint64_t tag, const std::string& text);
  // Has the other processes of a group print a report.
  void tell_group(int32_t group, const std::string& text) const;

  int64_t calls(int row, int regime) const;
  void set_limits(double slow_s, double budget_s);

 private:
  using Owned = std::vector<std::pair<int64_t, int>>;  // ids and ordinals
  Domain(int64_t arena_bytes, const Owned& devices, const vmm::Joining* joining);
  void meet();
  void enable_peers();
  void load_kernels();
  void open_all(const Owned& devices, bool joined);
  void open(Device& device, const std::vector<int>& seen_by) const;
  static void close(const Device& device);
  const vmm::Member& member(int64_t id) const;
  void give_up(int process);
  // Writes a word of a device's memory beside whatever its kernels do.
  void write(const Device& device, void* to, uint64_t word) const;
  void poison(const std::map<char*, const Device*>& windows, uint64_t word) const;

  std::vector<Device> devices_;
  std::vector<std::vector<bool>> peers_;  // by position in devices_
  const int64_t arena_bytes_;
  int max_blocks_ = kMaxBlocks;
  std::vector<vmm::Member> members_;             // all GPUs
  std::unique_ptr<vmm::Neighbours> neighbours_;  // null: one process has them all

  mutable std::mutex mutex_;
  int64_t used_ = 0;
  // Of the windows in every arena, by partition and world.
  std::map<std::pair<std::vector<int64_t>, int>, int64_t> offsets_;
  struct Attached {
    std::vector<int64_t> ids;  // of the ranks
    std::vector<int> processes;
    int64_t offset;

    bool operator==(const Attached&) const = default;
    bool has(int process) const {
      return std::find(processes.begin(), processes.end(), process) != processes.end();
    }
  };
  Attached group(int32_t number) const;
  std::vector<Attached> groups_;
};

}  // namespace purlin::peer
