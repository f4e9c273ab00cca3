// What is wrong with counts, as a sentence.
#pragma once

#include <string>

#include "snac/counts.h"

namespace purlin {

inline std::string describe(const Finding& found, int rank, int peer) {
  const auto text = [](int64_t n) { return std::to_string(n); };
  const std::string own = "rank " + text(rank), other = "rank " + text(peer);
  const std::string row =
      (found.value < 0 ? " begins at row " : " ends at row ") + text(found.value);
  switch (found.fault) {
    case Fault::kNegative:
      return own + " sends " + text(found.value) + " rows to " + other +
             "; counts must not be negative";
    case Fault::kOutside:
      return "what " + own + " sends to " + other + row + ", and its operand has " +
             text(found.limit) + " rows";
    case Fault::kCapacity:
      return "what " + own + " gets from " + other + row + ", and its result has room for " +
             text(found.limit) + (found.value < 0 ? " from row 0 on" : "; raise the capacity");
    case Fault::kDisagree:
      return other + " sends " + text(found.value) + " rows to " + own + ", which expects " +
             text(found.limit) + "; the sizes of all ranks must agree";
    case Fault::kOverlap:
      return "what " + own + " gets from " + other + " begins at row " + text(found.value) +
             ", among the rows from rank " + text(found.limit);
    case Fault::kNone: break;
  }
  return "";
}

}  // namespace purlin
