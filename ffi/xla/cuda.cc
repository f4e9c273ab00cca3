// The custom-call target of collectives between the GPUs of one process.
//
// A handler only launches: XLA captures it into a command buffer and replays it without calling it,
// so nothing that changes from call to call may live on the host.
#include "xla/cuda.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "atom/tag.h"
#include "domain/peer/domain.h"
#include "domain/peer/watcher.h"
#include "domain/site.h"
#include "snac/kernels.h"
#include "snac/refuse.h"
#include "xla/operands.h"
#include "xla/site.h"

namespace purlin::xla_ffi {
namespace {

struct CudaSite {
  static ffi::TypeId id;
  explicit CudaSite(Site given) : site(std::move(given)), kernels{find(false), find(true)} {
    if (kernels[0].function == nullptr)
      throw std::invalid_argument("no kernel for " + std::string(site.collective().name) + " " +
                                  site.reduce + " " + site.dtype + " in regime " +
                                  kRegimeNames[static_cast<int>(site.regime)] + " by Atom " +
                                  site.atom);
    peer::name_site(tag_of(site.tag), std::string(site.collective().name) + " in " + site.text);
  }

  Kernel find(bool flat) const {
    return find_kernel({site.atom, site.regime, site.collective().consume, site.reduce, site.dtype,
                        site.collective().counted, flat});
  }

  const Site site;
  const Kernel kernels[2];  // for any boxes, for flat ones

  // What does not change between the calls of a device.
  struct Ready {
    CudaCall call;
    Watch watch;
    int max_blocks;
  };
  std::mutex mutex;
  std::map<int, Ready> ready;  // by ordinal
};
ffi::TypeId CudaSite::id = {};
auto cuda_site_info = ffi::MakeTypeInfo<CudaSite>();

CudaSite::Ready prepare(const Site& site, int ordinal) {
  peer::Domain& domain = peer::Domain::start();
  auto ordinal_of = [&](int64_t logical) { return static_cast<int>(site.devices.at(logical)); };
  const auto own = std::find_if(site.partition.begin(), site.partition.end(),
                                [&](int64_t logical) { return ordinal_of(logical) == ordinal; });
  if (own == site.partition.end())
    throw std::runtime_error("device " + std::to_string(ordinal) + " is in no group");
  const int position = static_cast<int>(own - site.partition.begin());
  const int first = position / site.world * site.world;
  std::vector<int> group;
  for (int r = 0; r < site.world; ++r) group.push_back(ordinal_of(site.partition[first + r]));

  // Windows belong to an exact partition of the real devices, whatever the mesh calls them.
  std::vector<int64_t> partition;
  for (int64_t logical : site.partition) partition.push_back(ordinal_of(logical));
  CudaSite::Ready ready;
  ready.call.rank = position - first;
  ready.call.world = site.world;
  ready.call.depth = site.depth;
  ready.call.tag = static_cast<uint32_t>(tag_of(site.tag));
  domain.attach(partition, site.world, group, ready.call);
  const int64_t half = ready.call.capacity.staging_half;
  ready.call.staging_used = site.staging_bytes > 0 ? std::min(site.staging_bytes, half) : half;
  ready.call.packet_bytes =
      std::min(site.packet_bytes, most_packet_bytes<CudaForms>(ready.call.capacity));
  ready.max_blocks = domain.max_blocks();
  const peer::Device& device = domain.device(ordinal);
  ready.watch = {device.device_report, device.limits,
                 device.calls + site.row * kNumRegimes + static_cast<int>(site.regime), site.row};
  return ready;
}

ffi::Error execute(CudaSite* state, cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  try {
    const Site& site = state->site;
    const Buffers buffers = read_buffers(site, args, rets);
    CudaSite::Ready ready;
    {
      std::lock_guard lock(state->mutex);
      auto found = state->ready.find(ordinal);
      if (found == state->ready.end())
        found = state->ready.emplace(ordinal, prepare(site, ordinal)).first;
      ready = found->second;
    }
    CudaCall& call = ready.call;
    call.operands = static_cast<int>(buffers.plans.size());
    call.item_bytes = buffers.item_bytes;
    call.counted = buffers.counted;
    int64_t bytes = 0;
    for (int o = 0; o < call.operands; ++o) {
      call.operand[o] = {buffers.src[o], buffers.dst[o], buffers.plans[o], buffers.row_bytes[o]};
      bytes += buffers.plans[o].bytes();
    }
    if (bytes == 0 && !site.collective().counted) return ffi::Error::Success();
    const int blocks = std::min(site.blocks > 0 ? site.blocks : kMaxBlocks / 2, ready.max_blocks);
    const int threads = site.threads > 0 ? site.threads : kMaxThreads;
    if (const std::string why = refuse<CudaForms>(call, site.regime, blocks); !why.empty())
      throw std::invalid_argument(why);
    const cudaError_t error =
        launch(state->kernels[is_flat(call)], call, ready.watch, blocks, threads, stream);
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("purlin: ") + error.what());
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(purlin_cuda_instantiate, instantiate<CudaSite>,
                              ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(purlin_cuda_execute, execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CudaSite>>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Target cuda_target() {
  return {reinterpret_cast<void*>(purlin_cuda_instantiate),
          reinterpret_cast<void*>(purlin_cuda_execute), &CudaSite::id, &cuda_site_info};
}

}  // namespace purlin::xla_ffi
