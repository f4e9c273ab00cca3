// The custom-call target of collectives between the CPU devices of one process.
//
// A handler never blocks: it leaves its buffers at the meeting of its group and returns a future.
// The call site is the state that XLA keeps for one custom call of one executable.
#include "xla/cpu.h"

#include <algorithm>
#include <memory>

#include "domain/counters.h"
#include "domain/threads/room.h"
#include "xla/operands.h"
#include "xla/site.h"

namespace purlin::xla_ffi {
namespace {

struct CpuSite {
  static ffi::TypeId id;
  explicit CpuSite(Site given) : site(std::move(given)), room(site) {}

  const Site site;
  threads::Room room;
};
ffi::TypeId CpuSite::id = {};
auto cpu_site_info = ffi::MakeTypeInfo<CpuSite>();

ffi::Future execute(CpuSite* state, ffi::RunId run, ffi::Buffer<ffi::S32> partition,
                    ffi::RemainingArgs args, ffi::RemainingRets rets) {
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  auto done = [promise](const std::string& error) {
    if (error.empty())
      promise->SetAvailable();
    else
      promise->SetError(ffi::Error::Internal("purlin: " + error));
  };
  try {
    const Site& site = state->site;
    const Buffers buffers = read_buffers(site, args, rets);
    if (const std::string why = threads::refuse(site, buffers.plans, buffers.counted); !why.empty())
      throw std::invalid_argument(why);
    const int64_t own = partition.typed_data()[0];
    const auto& all = site.partition;
    const auto position = std::find(all.begin(), all.end(), own) - all.begin();
    if (static_cast<size_t>(position) == all.size())
      throw std::logic_error("partition " + std::to_string(own) + " is in no group");
    threads::Arrival arrival;
    std::copy(buffers.src.begin(), buffers.src.end(), arrival.src);
    std::copy(buffers.dst.begin(), buffers.dst.end(), arrival.dst);
    std::copy(buffers.row_bytes.begin(), buffers.row_bytes.end(), arrival.row_bytes);
    arrival.counted = buffers.counted;
    arrival.done = done;
    auto full = state->room.arrive(run.run_id, static_cast<int>(position), buffers.plans, arrival);
    Counters::instance().add(site.row, site.regime);
    if (full) threads::run(site, std::move(full));
  } catch (const std::exception& error) {
    done(error.what());
  }
  return future;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(purlin_cpu_instantiate, instantiate<CpuSite>,
                              ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(purlin_cpu_execute, execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CpuSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

}  // namespace

Target cpu_target() {
  return {reinterpret_cast<void*>(purlin_cpu_instantiate),
          reinterpret_cast<void*>(purlin_cpu_execute), &CpuSite::id, &cpu_site_info};
}

}  // namespace purlin::xla_ffi
