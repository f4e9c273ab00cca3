// The custom-call target of collectives between the CPU devices of one process.
//
// A handler never blocks: it leaves its buffers at the meeting of its group and returns a future.
// The call site is the state that XLA keeps for one custom call of one executable.
#include "xla/cpu.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "domain/counters.h"
#include "domain/shm/collective.h"
#include "domain/threads/room.h"
#include "xla/operands.h"
#include "xla/site.h"

namespace purlin::xla_ffi {
namespace {

// Numbers the custom calls of one executable that look alike: they come of a function that is
// called several times, and processes must not take one for the other. XLA makes the calls of an
// executable in the order of its module, which is the same in all processes.
class Instances {
 public:
  static Instances& instance() {
    static Instances all;
    return all;
  }
  // A program is about to hold a call with these attributes.
  void begin(int64_t ordinal, const std::string& text, uint64_t tag, bool cached) {
    std::lock_guard lock(mutex_);
    cached_ = cached_ || cached;
    count_[{ordinal, text, tag}] = 0;
  }
  // Whether any program of this process may have come out of a cache.
  bool may_be_cached() const { return cached_; }
  int64_t next(const Site& site) {
    if (site.processes.empty()) return 0;
    std::lock_guard lock(mutex_);
    return count_[{site.ordinal, site.text, site.tag}]++;
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<int64_t, std::string, uint64_t>, int64_t> count_;
  std::atomic<bool> cached_{false};
};

struct CpuSite {
  static ffi::TypeId id;
  explicit CpuSite(Site given)
      : site(std::move(given)), number(Instances::instance().next(site)), room(site) {}

  const Site site;
  const int64_t number;
  threads::Room room;
};
ffi::TypeId CpuSite::id = {};
auto cpu_site_info = ffi::MakeTypeInfo<CpuSite>();

ffi::Future execute(CpuSite* state, ffi::RunId run, ffi::Buffer<ffi::S32> partition,
                    ffi::RemainingArgs args, ffi::RemainingRets rets) {
  struct Ending {
    ffi::Promise promise;
    std::atomic_flag told = ATOMIC_FLAG_INIT;
  };
  auto ending = std::make_shared<Ending>();
  ffi::Future future(ending->promise);
  auto done = [ending](const std::string& error) {
    if (ending->told.test_and_set()) return;
    if (error.empty())
      ending->promise.SetAvailable();
    else
      ending->promise.SetError(ffi::Error::Internal("purlin: " + error));
  };
  std::shared_ptr<threads::Meeting> full;
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
    full = state->room.arrive(run.run_id, static_cast<int>(position), buffers.plans, arrival);
    Counters::instance().add(site.row, site.regime);
    if (full == nullptr) return future;
    if (full->arrived == site.world) {
      threads::run(site, full);
    } else {
      const int64_t occurrence = state->room.occurrence(run.run_id, full->group);
      const bool cached = Instances::instance().may_be_cached();
      shm::run(site, {state->number, run.run_id, occurrence, cached}, full);
    }
  } catch (const std::exception& error) {
    if (full == nullptr)
      done(error.what());
    else  // the others have left it to this one
      threads::complete(full, error.what());
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

void begin_call(int64_t ordinal, const std::string& text, uint64_t tag, bool cached) {
  Instances::instance().begin(ordinal, text, tag, cached);
}

Target cpu_target() {
  return {reinterpret_cast<void*>(purlin_cpu_instantiate),
          reinterpret_cast<void*>(purlin_cpu_execute), &CpuSite::id, &cpu_site_info};
}

}  // namespace purlin::xla_ffi
