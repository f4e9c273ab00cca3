// A domain of GPUs that see each other's memory, of one process or of several on a host: an arena
// on each of them, and its windows.
#include "domain/peer/domain.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "domain/peer/watcher.h"
#include "domain/vmm/memory.h"

namespace purlin::peer {
namespace {

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

std::mutex start_mutex, join_mutex;
std::atomic<Domain*> current[2] = {};  // of one process, of several

}  // namespace

Domain& Domain::start(const std::vector<int>& ordinals) {
  if (Domain* running = current[0]) return *running;
  std::lock_guard lock(start_mutex);
  if (current[0] == nullptr) {
    DeviceGuard guard;
    Owned devices;
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    for (int d = 0; d < count; ++d)
      if (ordinals.empty() || std::count(ordinals.begin(), ordinals.end(), d) != 0)
        devices.emplace_back(d, d);
    auto* domain = new Domain(arena_bytes_wanted(), devices, nullptr);  // as long as the process
    start_watcher(*domain);
    current[0] = domain;
  }
  return *current[0];
}

Domain& Domain::join(const vmm::Joining& joining) {
  static std::string failed;  // others may have gone on meanwhile, so it is not tried again
  std::lock_guard lock(join_mutex);
  if (!failed.empty()) throw std::runtime_error(failed);
  if (current[1] == nullptr) {
    DeviceGuard guard;
    Domain* domain;
    try {
      domain = new Domain(arena_bytes_wanted(), joining.devices, &joining);
      domain->meet();
    } catch (const std::exception& error) {
      failed = error.what();  // the domain stays: threads of its link use it
      throw;
    }
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
  try {
    open_all(devices, joining != nullptr);
  } catch (const std::exception&) {
    for (const Device& device : devices_) close(device);
    throw;
  }
  const int own = joining != nullptr ? joining->process : 0;
  for (const Device& device : devices_)
    members_.push_back({device.id, own, device.arena, arena_bytes_});
  if (joining == nullptr) return;
  neighbours_ = std::make_unique<vmm::Neighbours>(
      *joining, vmm::Neighbours::Events{[this](int process) { give_up(process); }, &peer::name_site,
                                        &publish});
}

void Domain::open_all(const Owned& devices, bool joined) {
  std::vector<int> seen_by;  // where other processes see the arena too
  if (joined)
    for (const auto& [_, ordinal] : devices) seen_by.push_back(ordinal);
  for (const auto& [id, ordinal] : devices) {
    devices_.emplace_back().id = id;
    devices_.back().ordinal = ordinal;
    open(devices_.back(), seen_by);
  }
  used_ = kWindowAlign;  // counters and limits
  enable_peers();
  load_kernels();
  for (const Device& device : devices_) {
    check(cudaSetDevice(device.ordinal), "cudaSetDevice");
    check(cudaDeviceSynchronize(), "zeroing the arena");
  }
}

void Domain::meet() {
  vmm::Own own;
  own.members = members_;
  own.used = used_;
  own.blocks = max_blocks_;
  for (size_t i = 0; i < devices_.size(); ++i)
    for (size_t j = 0; j < devices_.size(); ++j)
      if (!peers_[i][j]) own.blind.insert({devices_[i].id, devices_[j].id});
  neighbours_->meet(own);
  members_ = neighbours_->members();
  max_blocks_ = neighbours_->blocks();
}

void Domain::open(Device& device, const std::vector<int>& seen_by) const {
  check(cudaSetDevice(device.ordinal), "cudaSetDevice");
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device.ordinal), "cudaGetDeviceProperties");
  device.name = properties.name;
  device.capability = properties.major * 10 + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  check(cudaStreamCreateWithFlags(&device.side, cudaStreamNonBlocking), "cudaStreamCreate");
  if (seen_by.empty())
    check(cudaMalloc(reinterpret_cast<void**>(&device.arena), arena_bytes_),
          "allocating the arena (PURLIN_ARENA_MB sets its size; XLA_PYTHON_CLIENT_MEM_FRACTION "
          "leaves room beside XLA's pool)");
  else
    device.arena = vmm::allocate(device.ordinal, arena_bytes_, seen_by);
  check(cudaMemset(device.arena, 0, arena_bytes_), "cudaMemset");
  device.calls = reinterpret_cast<uint64_t*>(device.arena);
  device.limits = reinterpret_cast<Limits*>(device.calls + kNumCollectives * kNumRegimes);
  check(cudaHostAlloc(reinterpret_cast<void**>(&device.report), sizeof(Report),
                      cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  *device.report = {};
  check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&device.device_report), device.report, 0),
        "cudaHostGetDevicePointer");
}

// Gives back what a failed start has taken, but for memory that other processes may see: such a
// start is not tried again.
void Domain::close(const Device& device) {
  cudaSetDevice(device.ordinal);
  if (device.report != nullptr) cudaFreeHost(device.report);
  if (device.side != nullptr) cudaStreamDestroy(device.side);
  cudaFree(device.arena);  // which refuses what it has not allocated
  cudaGetLastError();
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
  if (neighbours_ != nullptr) return neighbours_->can_peer(ids);
  const auto wanted = [&](size_t i) {
    return std::count(ids.begin(), ids.end(), devices_[i].id) != 0;
  };
  for (size_t i = 0; i < devices_.size(); ++i)
    for (size_t j = 0; j < devices_.size(); ++j)
      if (!peers_[i][j] && wanted(i) && wanted(j)) return false;
  return true;
}

void Domain::write(const Device& device, void* to, uint64_t word) const {
  transfer(device, to, &word, sizeof word);
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
