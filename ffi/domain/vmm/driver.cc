// The functions of the CUDA driver for memory that processes share, found without linking it.
#include "domain/vmm/driver.h"

namespace purlin::vmm {
namespace {

constexpr unsigned kVersion = 12000;  // of the functions' signatures

template <class Function>
void find(const char* name, Function* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess)
    throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  *function = reinterpret_cast<Function>(found);
}

Driver load() {
  Driver driver;
  find("cuGetErrorString", &driver.error_string);
  find("cuMemCreate", &driver.create);
  find("cuMemRelease", &driver.release);
  find("cuMemAddressReserve", &driver.reserve);
  find("cuMemAddressFree", &driver.unreserve);
  find("cuMemMap", &driver.map);
  find("cuMemSetAccess", &driver.set_access);
  find("cuMemGetAllocationGranularity", &driver.granularity);
  find("cuMemExportToShareableHandle", &driver.to_handle);
  find("cuMemImportFromShareableHandle", &driver.from_handle);
  find("cuMemRetainAllocationHandle", &driver.retain);
  find("cuMemGetAddressRange", &driver.range_of);
  return driver;
}

}  // namespace

const Driver& Driver::get() {
  static const Driver driver = load();
  return driver;
}

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  Driver::get().error_string(result, &text);
  throw std::runtime_error(std::string(what) + ": " + (text != nullptr ? text : "unknown error"));
}

}  // namespace purlin::vmm
