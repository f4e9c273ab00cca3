// A call site: what all ranks of one collective agree on before it runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout/collectives.h"
#include "snac/regime.h"

namespace purlin {

struct Site {
  int row = 0;
  std::string reduce, dtype;  // of reductions; empty for copies
  std::string atom;
  Regime regime = Regime::kMeet;
  int blocks = 0;             // of each rank; 0: the domain's choice by size
  int threads = 0;            // of each block; 0: the domain's choice
  int depth = 0;              // stages of the Atom's ring; 0: as many as it has
  int64_t staging_bytes = 0;  // of one half that the call may use; 0: all of it
  int world = 1;
  std::vector<int64_t> partition;      // logical devices of all groups, one group after another
  std::vector<int64_t> devices;        // number of each logical device in its domain; empty: not known
  std::vector<int64_t> processes;      // of each logical device; empty: all are of this one
  int64_t ordinal = 0;                 // of the call in its program
  std::vector<int64_t> split, concat;  // of each operand
  // Of collectives whose counts are data: what else the call brings, and what it wants.
  bool expects = false;      // the rows that come from each peer
  bool placed = false;       // the first rows of what goes to each peer, on both sides
  bool keeps = false;        // arrays of which the results keep what nobody overwrites
  int64_t packet_bytes = 0;  // of a stream that travels in packets, at most
  int64_t most = -1;         // rows that one rank sends another, at most; -1: all that it has
  bool fill = false;         // zeros where nobody writes
  uint64_t tag = 0;
  std::string text;      // where the user wrote the call
  std::string operands;  // their types, for reports

  const Collective& collective() const { return kCollectives[row]; }
  // The process of the device at a position of the partition.
  int process_of(int position) const {
    return processes.empty() ? 0 : static_cast<int>(processes[partition[position]]);
  }
  int groups() const { return static_cast<int>(partition.size()) / world; }
};

}  // namespace purlin
