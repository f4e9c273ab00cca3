// The windows of ranks that are threads of one process.
#include "domain/threads/windows.h"

namespace purlin::threads {

void Windows::attach(const std::vector<int64_t>& partition, int group,
                     Call<CpuAtom::Packet>& call) {
  std::lock_guard lock(mutex_);
  auto& ranks = owned_[{partition, {call.world, group}}];
  if (ranks.empty()) {
    const size_t bytes = Window<CpuAtom::Packet>::packet_bytes(call.world, kPacketCapacity);
    for (int r = 0; r < call.world; ++r) {
      auto rank = std::make_unique<Owned>();
      rank->packets = std::make_unique<CpuAtom::Packet[]>(bytes / sizeof(CpuAtom::Packet));
      ranks.push_back(std::move(rank));
    }
  }
  call.packet_capacity = kPacketCapacity;
  for (int r = 0; r < call.world; ++r)
    call.window[r] = {&ranks[r]->control, ranks[r]->packets.get()};
}

}  // namespace purlin::threads
