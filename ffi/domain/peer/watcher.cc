// Prints what kernels report about waits that do not end, before Python sees an error.
#include "domain/peer/watcher.h"

#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <thread>

#include "atom/tag.h"
#include "domain/counters.h"
#include "domain/peer/domain.h"
#include "domain/peer/exit.h"
#include "snac/faults.h"

namespace purlin::peer {
namespace {

struct Log {
  std::mutex mutex;
  std::map<uint64_t, std::string> sites;
  std::string last;
};

Log& log() {
  static Log* all = new Log;
  return *all;
}

std::string site_of(uint64_t tag) {
  std::lock_guard lock(log().mutex);
  const auto found = log().sites.find(tag);
  return found == log().sites.end() ? "call site " + std::to_string(tag) : found->second;
}

std::string describe(const Domain& domain, const Device& device, const Report& r) {
  static constexpr const char* kPhases[] = {"entering", "waiting for packets", "leaving"};
  const auto alarm = static_cast<Alarm>(r.alarm);
  std::string text = "purlin: ";
  if (alarm == Alarm::kBadCounts) {
    const Finding found = {r.fault, static_cast<int64_t>(r.seen), static_cast<int64_t>(r.expected)};
    return text + "bad counts: " + std::string(kCollectives[r.row].name) + " call " +
           std::to_string(r.epoch) + " at " + site_of(r.tag) + ": " +
           purlin::describe(found, r.rank, r.peer);
  }
  text += alarm == Alarm::kSlow      ? "slow"
          : alarm == Alarm::kExpired ? "gave up"
          : alarm == Alarm::kLost    ? "lost"
                                     : "ranks disagree";
  text += ": " + std::string(kCollectives[r.row].name) + " call " + std::to_string(r.epoch) +
          " at " + site_of(r.tag) + ": " + domain.name_of(r.group, r.rank) + " of " +
          std::to_string(r.world) + " (device " + std::to_string(device.ordinal) + ", block " +
          std::to_string(r.block) + ") " + kPhases[static_cast<int>(r.phase)] + ", waiting for " +
          domain.name_of(r.group, r.peer);
  if (alarm == Alarm::kDisagree)
    return text + ", which runs " + site_of(tag_of(r.seen)) +
           "; all ranks must run the same program";
  if (alarm == Alarm::kLost) return text + "; process " + std::to_string(r.seen) + " has ended";
  // Flags hold the epoch and a tag; the words of the exit hold the epoch alone.
  auto epoch = [&](uint64_t word) { return r.phase == Phase::kLeave ? word : epoch_of(word); };
  return text + "; expected epoch " + std::to_string(epoch(r.expected)) + ", seen " +
         std::to_string(epoch(r.seen)) + ". The rank did not arrive. " +
         domain.about(r.group, r.peer, r.tag, site_of(r.tag)) +
         "Look at what its host thread does, or raise PURLIN_TIMEOUT_S";
}

// The device's report, which leaves room for the next one; without an alarm if there is none.
Report taken(const Device& device) {
  Report report = {};
  Exit::unless_ending([&] {
    uint64_t alarm = __atomic_load_n(&device.report->alarm, __ATOMIC_ACQUIRE);
    if (alarm == 0) return;
    const Report found = *device.report;
    // Another one may have come just now.
    if (__atomic_compare_exchange_n(&device.report->alarm, &alarm, 0, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
      report = found;
  });
  return report;
}

void watch(const Domain& domain) {
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(20)))
    for (const Device& device : domain.devices()) {
      const Report report = taken(device);
      if (report.alarm == 0) continue;
      const std::string text = describe(domain, device, report);
      publish(text);
      if (static_cast<Alarm>(report.alarm) != Alarm::kSlow) domain.tell_group(report.group, text);
    }
}

}  // namespace

void start_watcher(const Domain& domain) {
  Exit::expect();
  std::thread([&domain] { watch(domain); }).detach();
}

void publish(const std::string& text) {
  std::lock_guard lock(log().mutex);
  log().last = text;
  std::fprintf(stderr, "%s\n", text.c_str());
  std::fflush(stderr);
}

void name_site(uint64_t tag, const std::string& text) {
  std::lock_guard lock(log().mutex);
  log().sites[tag] = text;
}

std::string last_report() {
  std::lock_guard lock(log().mutex);
  return log().last;
}

}  // namespace purlin::peer
