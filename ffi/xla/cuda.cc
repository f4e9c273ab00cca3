// The custom-call target of collectives between the GPUs of one process, or of several on a host.
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
  }

  Kernel find(bool flat) const {
    return find_kernel({site.atom, site.regime, site.collective().consume, site.reduce, site.dtype,
                        site.collective().counted, flat});
  }

  const Site site;
  const Kernel kernels[2];  // for any boxes, for flat ones

  // What does not change between the calls of a device.
  struct Ready {
    peer::Domain* domain;
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
  const bool joined = !site.processes.empty();
  CudaSite::Ready ready;
  ready.domain = joined ? peer::Domain::running(true) : &peer::Domain::start();
  if (ready.domain == nullptr) throw std::runtime_error("the processes have not been joined");
  const peer::Device& device = ready.domain->device(ordinal);
  // Windows belong to an exact partition of the real devices, whatever the mesh calls them.
  peer::Group group;
  for (int64_t logical : site.partition) group.partition.push_back(site.devices.at(logical));
  const auto own = std::find(group.partition.begin(), group.partition.end(), device.id);
  if (own == group.partition.end())
    throw std::runtime_error("device " + std::to_string(ordinal) + " is in no group");
  const int position = static_cast<int>(own - group.partition.begin());
  group.world = site.world;
  group.first = position / site.world * site.world;
  ready.call.rank = position - group.first;
  ready.call.world = site.world;
  ready.call.depth = site.depth;
  ready.call.tag = static_cast<uint32_t>(tag_of(site.tag));
  const int32_t number = ready.domain->attach(group, ready.call);
  const int64_t half = ready.call.capacity.staging_half;
  ready.call.staging_used = site.staging_bytes > 0 ? std::min(site.staging_bytes, half) : half;
  ready.call.packet_bytes =
      std::min(site.packet_bytes, most_packet_bytes<CudaForms>(ready.call.capacity));
  ready.max_blocks = ready.domain->max_blocks();
  ready.watch = {device.device_report, device.limits,
                 device.calls + site.row * kNumRegimes + static_cast<int>(site.regime), site.row,
                 number};
  ready.domain->name_site(tag_of(site.tag), std::string(site.collective().name) + " in " +
                                                site.text + " (" + site.operands + ")");
  return ready;
}

// Tells the call where its ranks see what they use of this one's arrays. A rank that cannot tell is
// missed by the others.
void lend(peer::Domain& domain, int32_t group, Regime regime, CudaCall& call) {
  const bool pushes = regime == Regime::kZeroStagingPush;
  const bool both = regime == Regime::kZeroStagingComposed;
  try {
    for (int o = 0; o < call.operands; ++o) {
      const Operand& operand = call.operand[o];
      if (operand.plan.bytes() == 0) continue;  // an empty array need not lie anywhere
      if (!pushes) domain.lend(group, operand.src, call.lent[o].src);
      if (pushes || both) domain.lend(group, operand.dst, call.lent[o].dst);
    }
  } catch (const std::exception& error) {
    domain.fail(group, std::string("purlin: ") + error.what());
    throw;
  }
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
    ready.domain->check_group(ready.watch.group);
    if (is_lent(site.regime)) lend(*ready.domain, ready.watch.group, site.regime, call);
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
