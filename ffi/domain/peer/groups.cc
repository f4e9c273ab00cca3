// Groups of GPUs in a domain: their windows, what they lend each other, and how they end.
#include <algorithm>
#include <set>
#include <stdexcept>

#include "domain/peer/domain.h"
#include "domain/peer/exit.h"
#include "domain/peer/watcher.h"

namespace purlin::peer {
namespace {

// Of one window, over both halves and all sources.
constexpr int64_t kPacketBytes = 4 << 20;
constexpr int64_t kLineBytes = 8 << 20;
constexpr int64_t kStagingBytes = 8 << 20;

std::string key_of(const std::vector<int64_t>& partition, int world) {
  std::string key = std::to_string(world);
  for (int64_t id : partition) key += " " + std::to_string(id);
  return key;
}

}  // namespace

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
  bytes = (bytes + kWindowAlign - 1) / kWindowAlign * kWindowAlign;
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
  if (offset < 0) return -1;
  used_ = std::max(used_, offset + bytes);
  return offsets_[key] = offset;
}

int32_t Domain::attach(const Group& group, CudaCall& call) {
  call.capacity = capacity(group.world);
  Attached found;
  found.offset = reserve(group.partition, group.world);
  if (found.offset < 0) throw std::runtime_error(full());
  for (int r = 0; r < group.world; ++r) {
    const vmm::Member& rank = member(group.partition[group.first + r]);
    call.window[r] = {rank.arena + found.offset};
    found.ids.push_back(rank.id);
    found.processes.push_back(rank.process);
  }
  std::lock_guard lock(mutex_);
  const auto known = std::find(groups_.begin(), groups_.end(), found);
  const auto number = static_cast<int32_t>(known - groups_.begin());
  if (known == groups_.end()) groups_.push_back(std::move(found));
  return number;
}

std::string Domain::full() const {
  return "the arena of " + std::to_string(arena_bytes_ >> 20) +
         " MiB holds no window for another partition of the devices; raise PURLIN_ARENA_MB";
}

Domain::Attached Domain::group(int32_t number) const {
  std::lock_guard lock(mutex_);
  return groups_[number];
}

void Domain::check_group(int32_t number) const {
  if (neighbours_ == nullptr) return;
  std::lock_guard lock(mutex_);
  for (int process : groups_[number].processes)
    if (neighbours_->has_ended(process))
      throw std::runtime_error("process " + std::to_string(process) + " has ended");
}

void Domain::lend(int32_t number, const void* array, int64_t (&shift)[kMaxRanks]) {
  if (neighbours_ == nullptr) return;
  const std::vector<int> processes = group(number).processes;
  const auto by_process =
      neighbours_->lend(array, std::set<int>(processes.begin(), processes.end()));
  for (size_t r = 0; r < processes.size(); ++r) shift[r] = by_process[processes[r]];
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

void Domain::tell_group(int32_t number, const std::string& text) const {
  if (neighbours_ == nullptr) return;
  const std::vector<int> processes = group(number).processes;
  for (int process : std::set<int>(processes.begin(), processes.end()))
    if (process != neighbours_->process()) neighbours_->report(process, text);
}

void Domain::fail(int32_t number, const std::string& why) {
  publish(why);
  tell_group(number, why);
  const Attached failed = group(number);
  std::map<char*, const Device*> windows;
  for (int64_t id : failed.ids) windows[member(id).arena + failed.offset] = &devices_.front();
  poison(windows, kGivenUp);
}

// A process has ended: what waits for it must not go on. Its memory lives as long as it is mapped.
void Domain::give_up(int process) {
  std::map<char*, const Device*> windows;
  {
    std::lock_guard lock(mutex_);
    for (const Attached& group : groups_)
      for (const Device& device : devices_)
        if (group.has(process) &&
            std::find(group.ids.begin(), group.ids.end(), device.id) != group.ids.end())
          windows[device.arena + group.offset] = &device;
  }
  poison(windows, kEnded + process);
}

void Domain::poison(const std::map<char*, const Device*>& windows, uint64_t word) const {
  try {
    Exit::unless_ending([&] {
      for (const auto& [window, device] : windows)
        write(*device, &Window<CudaPacket>{window}.control().poison, word);
    });
  } catch (const std::exception&) {
    // This process ends too, or its context has failed already.
  }
}

}  // namespace purlin::peer
