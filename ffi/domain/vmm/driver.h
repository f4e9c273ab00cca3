// The functions of the CUDA driver for memory that processes share, found without linking it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace purlin::vmm {

// Throws std::runtime_error with the driver's own words.
void check(CUresult result, const char* what);

struct Driver {
  // Throws std::runtime_error where the driver lacks one of them.
  static const Driver& get();

  decltype(&cuGetErrorString) error_string;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) unreserve;
  decltype(&cuMemMap) map;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemExportToShareableHandle) to_handle;
  decltype(&cuMemImportFromShareableHandle) from_handle;
  decltype(&cuMemRetainAllocationHandle) retain;
  decltype(&cuMemGetAddressRange) range_of;
};

}  // namespace purlin::vmm
