// Memory of GPUs that other processes can map: made, exported as file descriptors, and mapped.
#include "domain/vmm/memory.h"

#include "domain/vmm/driver.h"

namespace purlin::vmm {
namespace {

constexpr auto kKind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

using Handle = CUmemGenericAllocationHandle;

// Memory lives while a handle or a mapping does; here mappings keep it.
class Held {
 public:
  explicit Held(Handle handle) : handle_(handle) {}
  ~Held() { Driver::get().release(handle_); }
  Held(const Held&) = delete;
  Handle get() const { return handle_; }

 private:
  const Handle handle_;
};

CUdeviceptr map(const Held& memory, int64_t bytes) {
  const Driver& driver = Driver::get();
  CUdeviceptr at = 0;
  check(driver.reserve(&at, bytes, 0, 0, 0), "reserving addresses for shared memory");
  if (const CUresult result = driver.map(at, bytes, 0, memory.get(), 0); result != CUDA_SUCCESS) {
    driver.unreserve(at, bytes);
    check(result, "mapping shared memory");
  }
  return at;
}

CUresult open(CUdeviceptr at, int64_t bytes, int ordinal) {
  CUmemAccessDesc access = {};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {ordinal}};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return Driver::get().set_access(at, bytes, &access, 1);
}

}  // namespace

char* allocate(int ordinal, int64_t bytes, const std::vector<int>& seen_by) {
  const Driver& driver = Driver::get();
  CUmemAllocationProp wanted = {};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.requestedHandleTypes = kKind;
  wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, {ordinal}};
  size_t unit = 0;
  check(driver.granularity(&unit, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM), "memory granularity");
  bytes = (bytes + unit - 1) / unit * unit;
  Handle handle;
  check(driver.create(&handle, bytes, &wanted, 0), "allocating memory to share");
  const CUdeviceptr at = map(Held(handle), bytes);
  check(open(at, bytes, ordinal), "letting a GPU use its arena");
  for (int each : seen_by) open(at, bytes, each);  // who cannot is left out of groups
  return reinterpret_cast<char*>(at);
}

Range range_of(const void* at) {
  CUdeviceptr base = 0;
  size_t bytes = 0;
  check(Driver::get().range_of(&base, &bytes, reinterpret_cast<CUdeviceptr>(at)),
        "looking for an array's allocation");
  return {reinterpret_cast<char*>(base), static_cast<int64_t>(bytes)};
}

link::Descriptor exported(char* base) {
  const Driver& driver = Driver::get();
  Handle handle;
  check(driver.retain(&handle, base), "memory that cannot be shared");
  const Held memory(handle);
  int fd = -1;
  check(driver.to_handle(&fd, memory.get(), kKind, 0), "memory that cannot be shared");
  return link::Descriptor(fd);
}

Mapped mapped(const link::Descriptor& descriptor, int64_t bytes, const std::vector<int>& ordinals) {
  Handle handle;
  auto* os_handle = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor.get()));
  check(Driver::get().from_handle(&handle, os_handle, kKind), "memory of another process");
  const CUdeviceptr at = map(Held(handle), bytes);
  Mapped found{reinterpret_cast<char*>(at), {}};
  for (int each : ordinals)
    if (open(at, bytes, each) != CUDA_SUCCESS) found.blind.push_back(each);
  return found;
}

}  // namespace purlin::vmm
