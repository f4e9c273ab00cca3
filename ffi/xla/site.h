// Reads a call site from the attributes of a custom call.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "domain/counters.h"
#include "domain/site.h"
#include "xla/ffi/api/ffi.h"

namespace purlin::xla_ffi {

namespace ffi = ::xla::ffi;

template <class T>
T attribute(const ffi::Dictionary& all, std::string_view name) {
  auto value = all.get<T>(name);
  if (!value.has_value())
    throw std::invalid_argument("attribute '" + std::string(name) + "' is missing");
  return *value;
}

inline std::vector<int64_t> numbers(const ffi::Dictionary& all, std::string_view name) {
  const auto span = attribute<ffi::Span<const int64_t>>(all, name);
  return {span.begin(), span.end()};
}

inline std::string text(const ffi::Dictionary& all, std::string_view name) {
  return std::string(attribute<std::string_view>(all, name));
}

inline int number(const ffi::Dictionary& all, std::string_view name, int least, int most) {
  const int64_t value = attribute<int64_t>(all, name);
  if (value < least || value > most)
    throw std::invalid_argument(std::string(name) + "=" + std::to_string(value) + " is outside " +
                                std::to_string(least) + " to " + std::to_string(most));
  return static_cast<int>(value);
}

// Throws std::invalid_argument with a sentence.
inline Site read_site(const ffi::Dictionary& all) {
  Site site;
  site.row = find_collective(text(all, "op"));
  if (site.row < 0) throw std::invalid_argument("no collective is called " + text(all, "op"));
  const int regime = find_regime(text(all, "regime"));
  if (regime < 0) throw std::invalid_argument("no regime is called " + text(all, "regime"));
  site.regime = static_cast<Regime>(regime);
  site.reduce = text(all, "reduce");
  site.dtype = text(all, "dtype");
  site.atom = text(all, "atom");
  site.blocks = number(all, "blocks", 0, kMaxBlocks);
  site.threads = number(all, "threads", 0, 1024);
  site.depth = number(all, "depth", 0, 64);
  site.staging_bytes = attribute<int64_t>(all, "staging_bytes");
  site.world = number(all, "world", 1, kMaxRanks);
  site.partition = numbers(all, "groups");
  site.devices = numbers(all, "devices");
  site.processes = numbers(all, "processes");
  site.ordinal = attribute<int64_t>(all, "ordinal");
  site.split = numbers(all, "split");
  site.concat = numbers(all, "concat");
  site.expects = number(all, "expects", 0, 1) != 0;
  site.placed = number(all, "placed", 0, 1) != 0;
  site.keeps = number(all, "keeps", 0, 1) != 0;
  site.packet_bytes = attribute<int64_t>(all, "packet_bytes");
  site.most = attribute<int64_t>(all, "most");
  site.fill = number(all, "fill", 0, 1) != 0;
  site.tag = static_cast<uint64_t>(attribute<int64_t>(all, "tag"));
  site.text = text(all, "site");
  site.operands = text(all, "operands");
  if (!site.processes.empty() && site.processes.size() != site.partition.size())
    throw std::invalid_argument("processes of " + std::to_string(site.processes.size()) +
                                " devices, expected " + std::to_string(site.partition.size()));
  if (site.partition.empty() || site.partition.size() % site.world != 0)
    throw std::invalid_argument("groups of " + std::to_string(site.world) +
                                " ranks do not divide " + std::to_string(site.partition.size()) +
                                " devices");
  return site;
}

// The state of a custom call of an executable; State is constructed from its Site.
template <class State>
ffi::ErrorOr<std::unique_ptr<State>> instantiate(ffi::Dictionary attributes) {
  try {
    return std::make_unique<State>(read_site(attributes));
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(std::string("purlin: ") + error.what()));
  }
}

}  // namespace purlin::xla_ffi
