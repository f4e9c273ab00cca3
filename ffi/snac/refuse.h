// Whether a call fits the windows that it would use.
#pragma once

#include <string>

#include "snac/call.h"
#include "snac/counted.h"
#include "snac/forms.h"
#include "snac/regime.h"
#include "snac/staged.h"
#include "snac/words.h"

namespace purlin {

// Of a counted stream: what fits a row of packets, wherever operands end.
template <class Atom>
int64_t most_packet_bytes(const Capacity& capacity) {
  return static_cast<int64_t>(capacity.packets - kMaxOperands) *
         static_cast<int64_t>(sizeof(typename Atom::Word));
}

inline std::string too_many(Regime regime, int64_t given, int64_t capacity, const char* unit,
                            int64_t bytes) {
  return std::string("the ") + kRegimeNames[static_cast<int>(regime)] + " regime holds " +
         std::to_string(capacity) + " " + unit + " of " + std::to_string(bytes) +
         " bytes for a peer, not " + std::to_string(given) +
         "; force zero_staging or leave the regime to the policy";
}

// Why a call does not fit, or an empty text.
template <class Atom>
std::string refuse(const Call<typename Atom::Packet>& call, Regime regime, int blocks) {
  using Word = typename Atom::Word;
  constexpr int64_t kWord = sizeof(Word);
  int64_t packets = 0, lines = 0;
  for (int o = 0; o < call.operands; ++o) {
    const int64_t words = words_of<Word>(call.operand[o].plan);
    packets += words;
    if constexpr (Atom::kLines) lines += (words + Atom::kLineWords - 1) / Atom::kLineWords;
  }
  if (regime == Regime::kPacket && packets > call.capacity.packets)
    return too_many(regime, packets, call.capacity.packets, "packets", kWord);
  if constexpr (Atom::kLines) {
    if (regime == Regime::kLine && lines > call.capacity.lines)
      return too_many(regime, lines, call.capacity.lines, "lines", Atom::kLineWords * kWord);
  } else if (regime == Regime::kLine) {
    return "regime line is for GPUs";
  }
  const bool counted = call.counted.sizes != nullptr;
  if (counted ? regime == Regime::kStaged && CountedStaging(call, 0, blocks).chunk == 0
              : is_staged(regime) && rounds_of(call, blocks, regime).count == 0)
    return std::to_string(call.staging_used) + " bytes of staging are too few for " +
           std::to_string(call.operands) + " operands in " + std::to_string(blocks) +
           " blocks; give more or take fewer blocks";
  return "";
}

}  // namespace purlin
