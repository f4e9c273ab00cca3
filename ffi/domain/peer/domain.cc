// The domain of one process and its GPUs: peer access, one arena on each device, and its windows.
#include "domain/peer/domain.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "domain/peer/watcher.h"

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
  cudaStream_t stream;
  check(cudaSetDevice(device.ordinal), "cudaSetDevice");
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

int64_t arena_bytes_wanted() {
  const char* text = std::getenv("PURLIN_ARENA_MB");
  return (text ? std::max(1L, std::atol(text)) : 128) << 20;
}

std::mutex start_mutex;
std::atomic<Domain*> current{nullptr};

}  // namespace

Domain& Domain::start() {
  std::lock_guard lock(start_mutex);
  if (!current) {
    DeviceGuard guard;
    auto* domain = new Domain(arena_bytes_wanted());  // lives as long as the process
    start_watcher(*domain);
    current = domain;
  }
  return *current;
}

Domain* Domain::running() { return current; }

Domain::Domain(int64_t arena_bytes) : arena_bytes_(arena_bytes) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  for (int d = 0; d < count; ++d) devices_.push_back(open(d));
  used_ = kAlign;  // counters and limits
  enable_peers();
  load_kernels();
  for (const Device& device : devices_) {
    check(cudaSetDevice(device.ordinal), "cudaSetDevice");
    check(cudaDeviceSynchronize(), "zeroing the arena");
  }
}

Device Domain::open(int ordinal) {
  Device device;
  device.ordinal = ordinal;
  check(cudaSetDevice(ordinal), "cudaSetDevice");
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  device.name = properties.name;
  device.capability = properties.major * 10 + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  check(
      cudaMalloc(reinterpret_cast<void**>(&device.arena), arena_bytes_),
      "allocating the arena (PURLIN_ARENA_MB sets its size; XLA_PYTHON_CLIENT_MEM_FRACTION leaves "
      "room beside XLA's pool)");
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

bool Domain::can_peer(const std::vector<int>& ordinals) const {
  for (int i : ordinals)
    for (int j : ordinals)
      if (!peers_.at(i).at(j)) return false;
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
  const int64_t bytes = Window<CudaPacket>::bytes(world, capacity(world));
  std::lock_guard lock(mutex_);
  const auto found = offsets_.find({partition, world});
  if (found != offsets_.end()) return found->second;
  if (used_ + bytes > arena_bytes_)
    throw std::runtime_error(
        "the arena of " + std::to_string(arena_bytes_ >> 20) +
        " MiB holds no window for another partition of the devices; raise PURLIN_ARENA_MB");
  const int64_t offset = used_;
  offsets_[{partition, world}] = offset;
  used_ += (bytes + kAlign - 1) / kAlign * kAlign;
  return offset;
}

void Domain::attach(const std::vector<int64_t>& partition, int world,
                    const std::vector<int>& ordinals, CudaCall& call) {
  call.capacity = capacity(world);
  const int64_t offset = reserve(partition, world);
  for (int r = 0; r < world; ++r) call.window[r] = {device(ordinals[r]).arena + offset};
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
