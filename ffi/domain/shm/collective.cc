// Runs a collective whose ranks are devices of several processes.
#include "domain/shm/collective.h"

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "domain/shm/domain.h"
#include "domain/text.h"
#include "domain/threads/room.h"

namespace purlin::shm {
namespace {

std::string in_brackets(const std::vector<int64_t>& numbers) {
  return "(" + listed(numbers, ",") + ")";
}

// What must be the same on all ranks.
std::string arguments_of(const Site& site) {
  std::string text = site.operands;
  if (!site.reduce.empty()) text += " " + site.reduce;
  text += " split=" + in_brackets(site.split) + " concat=" + in_brackets(site.concat) +
          " regime=" + kRegimeNames[static_cast<int>(site.regime)];
  if (site.blocks > 0) text += " blocks=" + std::to_string(site.blocks);
  if (site.staging_bytes > 0) text += " staging_bytes=" + std::to_string(site.staging_bytes);
  return text;
}

}  // namespace

void run(const Site& site, const Identity& identity, std::shared_ptr<threads::Meeting> meeting) {
  Domain* domain = Domain::running();
  if (domain == nullptr)
    throw std::logic_error(
        "the processes have not been joined, since the program was compiled elsewhere: lower a "
        "collective of their devices first");
  const int group = meeting->group;
  Arrival arrival;
  arrival.process = domain->process();
  arrival.what = std::string(site.collective().name) + " at " + site.text;
  // Windows belong to an exact partition of the real devices, whatever the mesh calls them.
  std::vector<int64_t> devices;
  for (int64_t logical : site.partition) devices.push_back(site.devices.at(logical));
  arrival.partition = std::to_string(site.world) + in_brackets(devices) + std::to_string(group);
  arrival.place = arrival.what + " " + arrival.partition;
  for (int64_t n : {site.ordinal, identity.instance, identity.occurrence})
    arrival.place += " " + std::to_string(n);
  arrival.key = arrival.place + " " + std::to_string(identity.run);
  arrival.arguments = arguments_of(site);
  arrival.run = identity.run;
  arrival.cached = identity.cached;
  arrival.window_bytes = threads::window_bytes(site.world);
  for (int r = 0; r < site.world; ++r)
    arrival.process_of_rank.push_back(site.process_of(group * site.world + r));
  const threads::Limits limits = threads::limits();
  arrival.slow_s = limits.slow_s, arrival.budget_s = limits.budget_s;

  Domain::Call call;
  call.arrival = arrival;
  call.running = std::make_shared<Running>(*domain, arrival);
  call.fail = [meeting](const std::string& why) { threads::complete(meeting, why); };
  call.go = [domain, meeting, running = call.running, key = arrival.key,
             site = &site](char* windows) {
    threads::run_shared(*site, meeting, windows, running, [domain, key] { domain->finish(key); });
  };
  domain->submit(std::move(call));
}

}  // namespace purlin::shm
