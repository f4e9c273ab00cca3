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
#include <string_view>

#include "domain/counters.h"
#include "domain/threads/meeting.h"
#include "xla/operands.h"

namespace purlin::xla_ffi {
namespace {

using threads::Meeting;
using threads::Site;

struct CpuSite {
  static ffi::TypeId id;

  Site site;
  int world = 1;
  std::vector<int64_t> split, concat;

  std::mutex mutex;
  std::map<std::pair<int64_t, int>, std::shared_ptr<Meeting>> open;  // by run and group
};
ffi::TypeId CpuSite::id = {};
auto cpu_site_info = ffi::MakeTypeInfo<CpuSite>();

ffi::ErrorOr<std::unique_ptr<CpuSite>> instantiate(std::string_view op, std::string_view reduce,
                                                   std::string_view dtype, std::string_view regime,
                                                   int64_t blocks, int64_t world,
                                                   ffi::Span<const int64_t> groups,
                                                   ffi::Span<const int64_t> split,
                                                   ffi::Span<const int64_t> concat) {
  auto state = std::make_unique<CpuSite>();
  const int row = find_collective(op), regime_number = find_regime(regime);
  if (row < 0 || regime_number < 0)
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "purlin: no collective '" + std::string(op) + "' in regime '" + std::string(regime) + "'"));
  if (world < 1 || world > kMaxRanks || groups.size() % static_cast<size_t>(world) != 0)
    return ffi::Unexpected(
        ffi::Error::InvalidArgument("purlin: groups of " + std::to_string(world) +
                                    " ranks are outside 1 to " + std::to_string(kMaxRanks)));
  if (blocks < 0 || blocks > kMaxBlocks)
    return ffi::Unexpected(ffi::Error::InvalidArgument("purlin: " + std::to_string(blocks) +
                                                       " blocks are outside 0 to " +
                                                       std::to_string(kMaxBlocks)));
  state->site = {row,
                 std::string(reduce),
                 std::string(dtype),
                 static_cast<Regime>(regime_number),
                 static_cast<int>(blocks),
                 {groups.begin(), groups.end()}};
  state->world = static_cast<int>(world);
  state->split.assign(split.begin(), split.end());
  state->concat.assign(concat.begin(), concat.end());
  return state;
}

// Adds one rank to its meeting; returns the meeting once it is full.
std::shared_ptr<Meeting> arrive(CpuSite& state, int64_t run, int64_t position,
                                const Buffers& buffers, threads::Done done) {
  const int group = static_cast<int>(position / state.world);
  const int rank = static_cast<int>(position % state.world);
  std::lock_guard lock(state.mutex);
  auto& meeting = state.open[{run, group}];
  if (!meeting) {
    meeting = std::make_shared<Meeting>();
    meeting->group = group;
    meeting->ranks.resize(state.world);
    meeting->here.resize(state.world);
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
  if (++meeting->arrived < state.world) return nullptr;
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
    const Buffers buffers =
        read_buffers(kCollectives[site.row], args, rets, state->world, state->split, state->concat);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(purlin_cpu_instantiate, instantiate,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<std::string_view>("op")
                                  .Attr<std::string_view>("reduce")
                                  .Attr<std::string_view>("dtype")
                                  .Attr<std::string_view>("regime")
                                  .Attr<int64_t>("blocks")
                                  .Attr<int64_t>("world")
                                  .Attr<ffi::Span<const int64_t>>("groups")
                                  .Attr<ffi::Span<const int64_t>>("split")
                                  .Attr<ffi::Span<const int64_t>>("concat"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(purlin_cpu_execute, execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CpuSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

}  // namespace

CpuTarget cpu_target() {
  return {reinterpret_cast<void*>(purlin_cpu_instantiate),
          reinterpret_cast<void*>(purlin_cpu_execute), &CpuSite::id, &cpu_site_info};
}

}  // namespace purlin::xla_ffi
