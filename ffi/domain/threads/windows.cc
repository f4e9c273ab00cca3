// The windows of ranks that are threads of one process.
#include "domain/threads/windows.h"

#include <sys/mman.h>

#include <new>

namespace purlin::threads {
namespace {

// Pages that exist once they are touched, and read as zero.
char* zeroed_pages(int64_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(at);
}

}  // namespace

void Windows::attach(const std::vector<int64_t>& partition, int group,
                     Call<CpuAtom::Packet>& call) {
  std::lock_guard lock(mutex_);
  auto& bases = bases_[{partition, {call.world, group}}];
  while (bases.size() < static_cast<size_t>(call.world))
    bases.push_back(zeroed_pages(Window<CpuAtom::Packet>::bytes(call.world, kCapacity)));
  call.capacity = kCapacity;
  for (int r = 0; r < call.world; ++r) call.window[r] = {bases[r]};
}

}  // namespace purlin::threads
