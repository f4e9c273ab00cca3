// A domain of GPUs that see each other's memory, of one process or of several on a host: an arena
// on each of them, and its windows.
#include "domain/peer/domain.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <set>
#include <stdexcept>

#include "domain/peer/watcher.h"
#include "domain/vmm/memory.h"

namespace purlin::peer {
namespace {

// Of one window, over both halves and all sources.
constexpr int64_t kPacketBytes = 4 << 20;
constexpr int64_t kLineBytes = 8 << 20;
constexpr int64_t kStagingBytes = 8 << 20;
constexpr int64_t kAlign = 4096;

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Restores the calling thread's device: XLA's threads rely on theirs.
class DeviceGuard {
 public:
  DeviceGuard() { cudaGetDevice(&device_); }
  ~DeviceGuard() { cudaSetDevice(device_); }

 private:
  int device_ = 0;
};

// A copy that waits for no other stream of the device: kernels may be waiting for each other.
void transfer(const Device& device, void* to, const void* from, size_t bytes) {
  DeviceGuard guard;
  check(cudaSetDevice(device.ordinal), "cudaSetDevice");
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, device.side), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(device.side), "cudaStreamSynchronize");
}

int64_t arena_bytes_wanted() {
  const char* text = std::getenv("PURLIN_ARENA_MB");
  return (text ? std::max(1L, std::atol(text)) : 256) << 20;
}

std::string key_of(const std::vector<int64_t>& partition, int world) {
  std::string key = std::to_string(world);
  for (int64_t id : partition) key += " " + std::to_string(id);
  return key;
}

std::mutex start_mutex;
std::atomic<Domain*> current[2] = {};  // of one process, of several

}  // namespace

Domain& Domain::start(const std::vector<int>& ordinals) {
  std::lock_guard lock(start_mutex);
  if (current[0] == nullptr) {
    DeviceGuard guard;
    Owned devices;
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    for (int d = 0; d < count; ++d)
      if (ordinals.empty() || std::count(ordinals.begin(), ordinals.end(), d) != 0)
        devices.emplace_back(d, d);
    auto* domain =
        new Domain(arena_bytes_wanted(), devices, nullptr);  // lives as long as the process
    start_watcher(*domain);
    current[0] = domain;
  }
  return *current[0];
}

Domain& Domain::join(const vmm::Joining& joining) {
  std::lock_guard lock(start_mutex);
  if (current[1] == nullptr) {
    DeviceGuard guard;
    auto* domain = new Domain(arena_bytes_wanted(), joining.devices, &joining);
    start_watcher(*domain);
    current[1] = domain;
  }
  return *current[1];
}

Domain* Domain::running(bool joined) { return current[joined]; }

std::vector<Domain*> Domain::all() {
  std::vector<Domain*> found;
  for (Domain* domain : current)
    if (domain != nullptr) found.push_back(domain);
  return found;
}

Domain::Domain(int64_t arena_bytes, const Owned& devices, const vmm::Joining* joining)
    : arena_bytes_(arena_bytes) {
  std::vector<int> seen_by;  // where other processes see the arena too
  if (joining != nullptr)
    for (const auto& [_, ordinal] : devices) seen_by.push_back(ordinal);
  for (const auto& [id, ordinal] : devices) devices_.push_back(open(id, ordinal, seen_by));
  used_ = kAlign;  // counters and limits
  enable_peers();
  load_kernels();
  for (const Device& device : devices_) {
    check(cudaSetDevice(device.ordinal), "cudaSetDevice");
    check(cudaDeviceSynchronize(), "zeroing the arena");
  }
  const int own = joining != nullptr ? joining->process : 0;
  for (const Device& device : devices_)
    members_.push_back({device.id, own, device.arena, arena_bytes_});
  if (joining == nullptr) return;
  neighbours_ = std::make_unique<vmm::Neighbours>(
      *joining, vmm::Neighbours::Events{[this](int process) { give_up(process); }, &peer::name_site,
                                        &publish});
  neighbours_->meet(members_, used_);
  members_ = neighbours_->members();
}

Device Domain::open(int64_t id, int ordinal, const std::vector<int>& seen_by) {
  Device device;
  device.id = id;
  device.ordinal = ordinal;
  check(cudaSetDevice(ordinal), "cudaSetDevice");
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  device.name = properties.name;
  device.capability = properties.major * 10 + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  check(cudaStreamCreateWithFlags(&device.side, cudaStreamNonBlocking), "cudaStreamCreate");
  if (seen_by.empty())
    check(cudaMalloc(reinterpret_cast<void**>(&device.arena), arena_bytes_),
          "allocating the arena (PURLIN_ARENA_MB sets its size; XLA_PYTHON_CLIENT_MEM_FRACTION "
          "leaves room beside XLA's pool)");
  else
    device.arena = vmm::allocate(ordinal, arena_bytes_, seen_by);
  check(cudaMemset(device.arena, 0, arena_bytes_), "cudaMemset");
  device.calls = reinterpret_cast<uint64_t*>(device.arena);
  device.limits = reinterpret_cast<Limits*>(device.calls + kNumCollectives * kNumRegimes);
  check(cudaHostAlloc(reinterpret_cast<void**>(&device.report), sizeof(Report),
                      cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  *device.report = {};
  check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&device.device_report), device.report, 0),
        "cudaHostGetDevicePointer");
  return device;
}

void Domain::enable_peers() {
  peers_.assign(devices_.size(), std::vector<bool>(devices_.size(), true));
  for (size_t i = 0; i < devices_.size(); ++i)
    for (size_t j = 0; j < devices_.size(); ++j) {
      if (i == j) continue;
      int can = 0;
      check(cudaDeviceCanAccessPeer(&can, devices_[i].ordinal, devices_[j].ordinal),
            "cudaDeviceCanAccessPeer");
      peers_[i][j] = can;
      if (!can) continue;
      check(cudaSetDevice(devices_[i].ordinal), "cudaSetDevice");
      const cudaError_t error = cudaDeviceEnablePeerAccess(devices_[j].ordinal, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled)
        cudaGetLastError();  // XLA was first
      else
        check(error, "cudaDeviceEnablePeerAccess");
    }
}

void Domain::load_kernels() {
  for (const Device& device : devices_) {
    check(cudaSetDevice(device.ordinal), "cudaSetDevice");
    for (const Kernel& kernel : all_kernels(device.capability)) {
      const int scratch = kernel.scratch_bytes != nullptr ? kernel.scratch_bytes(0) : 0;
      if (scratch > 0)
        check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   scratch),
              "reserving shared memory");
      // The grid must be co-resident, beside another of its kind: blocks wait for blocks.
      int per_sm = 0;
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel.function, kMaxThreads,
                                                          scratch),
            "loading a kernel");
      max_blocks_ = std::clamp(per_sm * device.multiprocessors / 2, 1, max_blocks_);
    }
  }
}

const Device& Domain::device(int ordinal) const {
  for (const Device& device : devices_)
    if (device.ordinal == ordinal) return device;
  throw std::runtime_error("device " + std::to_string(ordinal) + " is not in the domain");
}

const vmm::Member& Domain::member(int64_t id) const {
  for (const vmm::Member& member : members_)
    if (member.id == id) return member;
  throw std::runtime_error("GPU " + std::to_string(id) + " is not in the domain");
}

bool Domain::can_peer(const std::vector<int64_t>& ids) const {
  if (neighbours_ != nullptr && !neighbours_->can_peer(ids)) return false;
  for (size_t i = 0; i < devices_.size(); ++i)
    for (size_t j = 0; j < devices_.size(); ++j)
      if (!peers_[i][j] && std::count(ids.begin(), ids.end(), devices_[i].id) != 0 &&
          std::count(ids.begin(), ids.end(), devices_[j].id) != 0)
        return false;
  return true;
}

int64_t Domain::arena_used() const {
  std::lock_guard lock(mutex_);
  return used_;
}

Capacity Domain::capacity(int world) {
  Capacity capacity;
  capacity.packets = static_cast<int32_t>(kPacketBytes / (2 * world * sizeof(CudaPacket)));
  capacity.lines = static_cast<int32_t>(kLineBytes / (2 * world * sizeof(Line)));
  capacity.staging_half = kStagingBytes / 2;
  return capacity;
}

int64_t Domain::reserve(const std::vector<int64_t>& partition, int world) {
  int64_t bytes = Window<CudaPacket>::bytes(world, capacity(world));
  bytes = (bytes + kAlign - 1) / kAlign * kAlign;
  const auto key = std::pair(partition, world);
  {
    std::lock_guard lock(mutex_);
    if (const auto found = offsets_.find(key); found != offsets_.end()) return found->second;
  }
  // Windows lie at the same place in all arenas, so one process has to say where.
  const int64_t asked =
      neighbours_ != nullptr ? neighbours_->reserve(key_of(partition, world), bytes) : 0;
  std::lock_guard lock(mutex_);
  if (const auto found = offsets_.find(key); found != offsets_.end()) return found->second;
  const int64_t offset = neighbours_ != nullptr          ? asked
                         : used_ + bytes <= arena_bytes_ ? used_
                                                         : -1;
  if (offset < 0)
    throw std::runtime_error(
        "the arena of " + std::to_string(arena_bytes_ >> 20) +
        " MiB holds no window for another partition of the devices; raise PURLIN_ARENA_MB");
  used_ = std::max(used_, offset + bytes);
  return offsets_[key] = offset;
}

int32_t Domain::attach(const Group& group, CudaCall& call) {
  call.capacity = capacity(group.world);
  Attached found;
  found.offset = reserve(group.partition, group.world);
  for (int r = 0; r < group.world; ++r) {
    const vmm::Member& rank = member(group.partition[group.first + r]);
    call.window[r] = {rank.arena + found.offset};
    found.ids.push_back(rank.id);
    found.processes.push_back(rank.process);
  }
  std::lock_guard lock(mutex_);
  groups_.push_back(std::move(found));
  return static_cast<int32_t>(groups_.size()) - 1;
}

void Domain::check_group(int32_t group) const {
  if (neighbours_ == nullptr) return;
  std::lock_guard lock(mutex_);
  for (int process : groups_[group].processes)
    if (neighbours_->has_ended(process))
      throw std::runtime_error("process " + std::to_string(process) + " has ended");
}

void Domain::lend(int32_t group, CudaCall& call) {
  if (neighbours_ == nullptr) return;
  std::vector<int> processes;
  {
    std::lock_guard lock(mutex_);
    processes = groups_[group].processes;
  }
  for (int o = 0; o < call.operands; ++o) {
    const auto src = neighbours_->lend(call.operand[o].src);
    const auto dst = neighbours_->lend(call.operand[o].dst);
    for (int r = 0; r < call.world; ++r) {
      call.lent[o].src[r] = src[processes[r]];
      call.lent[o].dst[r] = dst[processes[r]];
    }
  }
}

std::string Domain::name_of(int32_t group, int rank) const {
  const std::string name = "rank " + std::to_string(rank);
  if (neighbours_ == nullptr) return name;
  std::lock_guard lock(mutex_);
  return name + " (process " + std::to_string(groups_[group].processes[rank]) + ")";
}

std::string Domain::about(int32_t group, int rank, uint64_t tag, const std::string& text) const {
  if (neighbours_ == nullptr) return "";
  std::lock_guard lock(mutex_);
  const int process = groups_[group].processes[rank];
  return process == neighbours_->process() ? "" : neighbours_->about(process, tag, text);
}

void Domain::name_site(uint64_t tag, const std::string& text) {
  peer::name_site(tag, text);
  if (neighbours_ != nullptr) neighbours_->name_site(tag, text);
}

void Domain::tell_group(int32_t group, const std::string& text) const {
  if (neighbours_ == nullptr) return;
  std::vector<int> processes;
  {
    std::lock_guard lock(mutex_);
    processes = groups_[group].processes;
  }
  for (int process : std::set<int>(processes.begin(), processes.end()))
    if (process != neighbours_->process()) neighbours_->report(process, text);
}

// A process has ended: what waits for it must not go on. Its memory lives as long as it is mapped.
void Domain::give_up(int process) {
  std::lock_guard lock(mutex_);
  std::map<const Device*, std::vector<uint64_t*>> poisoned;
  for (const Attached& group : groups_) {
    if (std::count(group.processes.begin(), group.processes.end(), process) == 0) continue;
    for (const Device& device : devices_)
      if (std::count(group.ids.begin(), group.ids.end(), device.id) != 0)
        poisoned[&device].push_back(
            &Window<CudaPacket>{device.arena + group.offset}.control().poison);
  }
  const uint64_t poison = kEnded + process;
  try {
    for (const auto& [device, words] : poisoned)
      for (uint64_t* word : words) transfer(*device, word, &poison, sizeof poison);
  } catch (const std::exception&) {
    // This process ends too, or its context has failed already.
  }
}

int64_t Domain::calls(int row, int regime) const {
  int64_t sum = 0;
  for (const Device& device : devices_) {
    uint64_t n = 0;
    transfer(device, &n, device.calls + row * kNumRegimes + regime, sizeof n);
    sum += static_cast<int64_t>(n);
  }
  return sum;
}

void Domain::set_limits(double slow_s, double budget_s) {
  const Limits limits{static_cast<uint64_t>(budget_s * 1e9), static_cast<uint64_t>(slow_s * 1e9)};
  for (const Device& device : devices_) transfer(device, device.limits, &limits, sizeof limits);
}

}  // namespace purlin::peer
