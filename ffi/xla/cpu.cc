// The custom-call target of collectives between the CPU devices of one process.
//
// A handler never blocks: it leaves its buffers at the meeting of its group and returns a future.
// The meeting is found by the call site (the state that XLA keeps for one custom call of one
// executable), the run and the group. A rank cannot arrive twice at one meeting, since what follows
// its call needs the future; so no epoch is needed, and nothing is kept between calls.
#include "xla/cpu.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "domain/counters.h"
#include "domain/threads/meeting.h"
#include "xla/operands.h"
#include "xla/site.h"

namespace purlin::xla_ffi {
namespace {

using threads::Meeting;

struct CpuSite {
  static ffi::TypeId id;
  explicit CpuSite(Site site) : site(std::move(site)) {}

  const Site site;
  std::mutex mutex;
  std::map<std::pair<int64_t, int>, std::shared_ptr<Meeting>> open;  // by run and group
};
ffi::TypeId CpuSite::id = {};
auto cpu_site_info = ffi::MakeTypeInfo<CpuSite>();

// Adds one rank to its meeting; returns the meeting once it is full.
std::shared_ptr<Meeting> arrive(CpuSite& state, int64_t run, int64_t position,
                                const Buffers& buffers, threads::Done done) {
  const int group = static_cast<int>(position / state.site.world);
  const int rank = static_cast<int>(position % state.site.world);
  std::lock_guard lock(state.mutex);
  auto& meeting = state.open[{run, group}];
  if (!meeting) {
    meeting = std::make_shared<Meeting>();
    meeting->group = group;
    meeting->ranks.resize(state.site.world);
    meeting->here.resize(state.site.world);
    meeting->plans = buffers.plans;
  }
  if (meeting->here[rank]) throw std::logic_error("rank arrived twice at one collective");
  meeting->here[rank] = true;
  threads::Arrival& mine = meeting->ranks[rank];
  for (size_t o = 0; o < buffers.plans.size(); ++o) {
    mine.src[o] = buffers.src[o];
    mine.dst[o] = buffers.dst[o];
  }
  mine.done = std::move(done);
  if (++meeting->arrived < state.site.world) return nullptr;
  auto full = std::move(meeting);
  state.open.erase({run, group});
  return full;
}

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
    if (const std::string why = threads::refuse(site, buffers.plans); !why.empty())
      throw std::invalid_argument(why);
    const int64_t own = partition.typed_data()[0];
    const auto& all = site.partition;
    const auto position = std::find(all.begin(), all.end(), own) - all.begin();
    if (static_cast<size_t>(position) == all.size())
      throw std::logic_error("partition " + std::to_string(own) + " is in no group");
    Counters::instance().add(site.row, site.regime);
    if (auto full = arrive(*state, run.run_id, position, buffers, done))
      threads::run(site, std::move(full));
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
