// Memory of GPUs that other processes can map: made, exported as file descriptors, and mapped.
#pragma once

#include <cstdint>
#include <vector>

#include "domain/link/socket.h"

namespace purlin::vmm {

// All throw std::runtime_error.

// Memory of a device that the devices `seen_by` of this process may use too, where they can.
char* allocate(int ordinal, int64_t bytes, const std::vector<int>& seen_by);

// The allocation in which an address lies.
struct Range {
  char* base;
  int64_t bytes;
};
Range range_of(const void* at);

// A descriptor for the allocation that begins at `base`.
link::Descriptor exported(char* base);

// Memory of another process, which stays mapped.
struct Mapped {
  char* base = nullptr;
  std::vector<int> blind;  // devices of this process that cannot use it
};
Mapped mapped(const link::Descriptor& descriptor, int64_t bytes, const std::vector<int>& ordinals);

}  // namespace purlin::vmm
