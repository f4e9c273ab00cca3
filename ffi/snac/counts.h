// Rows that ranks send each other where counts are data of the program, and what is wrong with
// them.
#pragma once

#include <cstdint>

#include "layout/collectives.h"
#include "layout/host_device.h"
#include "snac/window.h"

namespace purlin {

// What is wrong with counts. The rank that finds it names itself and a peer.
enum class Fault : int32_t {
  kNone,
  kNegative,  // value rows for the peer
  kOutside,   // rows for the peer end at row `value` of an operand of `limit`
  kCapacity,  // rows from the peer end at row `value` of a result of `limit`
  kDisagree,  // the peer sends `value` rows, and `limit` are expected
  kOverlap,   // rows from the peer begin at row `value`, where those of rank `limit` lie
};

struct Finding {
  Fault fault = Fault::kNone;
  int64_t value = 0, limit = 0;
};

// Rows, by peer, as one rank knows them.
struct Counts {
  int64_t send[kMaxRanks], send_at[kMaxRanks];  // at: first row in the operand
  int64_t receive[kMaxRanks], receive_at[kMaxRanks];
  int64_t most[kMaxRanks];  // the most that this peer sends to any
};

// Rows of a result up to `end` that nobody writes, and the row behind those that follow.
struct Gap {
  int64_t end, next;
};

// Where the counts of a call lie: arrays of `world` integers.
struct Counted {
  const void* sizes = nullptr;     // rows for each peer
  const void* expected = nullptr;  // rows from each peer, where the caller knows them
  const void* from = nullptr;      // first row of what goes to each peer; else blocks lie packed
  const void* to = nullptr;        // first row at each peer of what goes there; else likewise
  void* received = nullptr;        // result: rows from each peer
  int64_t rows_in = 0;             // of the operands
  int64_t most = 0;                // rows that one rank sends another, at most
  int64_t rows_out = 0;            // of the results
  bool wide = false;               // integers of eight bytes, not of four
  bool splits_input = false, splits_output = false, reduces = false;
  bool fill = false;  // zeros where nobody writes

  PURLIN_HD int64_t read(const void* array, int i) const {
    return wide ? static_cast<const int64_t*>(array)[i] : static_cast<const int32_t*>(array)[i];
  }
  PURLIN_HD void write_received(int i, int64_t rows) const {
    if (wide)
      static_cast<int64_t*>(received)[i] = rows;
    else
      static_cast<int32_t*>(received)[i] = static_cast<int32_t>(rows);
  }

  PURLIN_HD int64_t send_at(int p) const {
    if (from != nullptr) return read(from, p);
    return splits_input ? before(p, rows_in, [&](int k) { return read(sizes, k); }) : 0;
  }
  // Once all of counts.receive are known; for calls that do not say where.
  PURLIN_HD int64_t receive_at(const Counts& counts, int q) const {
    return splits_output ? before(q, rows_out, [&](int k) { return counts.receive[k]; }) : 0;
  }

  PURLIN_HD Finding check_send(const Counts& counts, int p) const {
    const int64_t rows = counts.send[p], at = counts.send_at[p];
    if (rows < 0) return {Fault::kNegative, rows};
    if (rows > most) return {Fault::kOutside, rows, most};
    if (rows > 0 && (at < 0 || rows > rows_in - at))
      return {Fault::kOutside, at < 0 ? at : at + rows, rows_in};
    return {};
  }
  PURLIN_HD Finding check_receive(const Counts& counts, int rank, int q) const {
    const int64_t rows = counts.receive[q], at = counts.receive_at[q];
    if (expected != nullptr && read(expected, q) != rows)
      return {Fault::kDisagree, rows, read(expected, q)};
    if (reduces && rows != counts.receive[rank])
      return {Fault::kDisagree, rows, counts.receive[rank]};
    if (rows > 0 && (at < 0 || rows > rows_out - at))
      return {Fault::kCapacity, at < 0 ? at : at + rows, rows_out};
    for (int other = 0; other < q && to != nullptr; ++other) {
      const int64_t begin = counts.receive_at[other], end = begin + counts.receive[other];
      if (rows > 0 && begin < end && at < end && begin < at + rows)
        return {Fault::kOverlap, at, other};
    }
    return {};
  }

  // The row from which on there may be gaps: without places, that behind the last one received.
  PURLIN_HD int64_t solid(const Counts& counts, int world) const {
    int64_t last = 0;
    for (int q = 0; q < world && to == nullptr; ++q) {
      const int64_t end = counts.receive_at[q] + counts.receive[q];
      if (counts.receive[q] > 0 && end > last) last = end;
    }
    return last;
  }
  // What nobody writes from row `at` on, which is that of solid() or the `next` of a gap.
  PURLIN_HD Gap gap(const Counts& counts, int world, int64_t at) const {
    Gap gap{rows_out, rows_out};
    for (int q = 0; q < world; ++q) {
      const int64_t begin = counts.receive_at[q];
      if (counts.receive[q] == 0 || begin < at || begin >= gap.end) continue;
      gap = {begin, begin + counts.receive[q]};
    }
    return gap;
  }

 private:
  // Rows of the ranks before p. Each is bounded, since none has been checked yet.
  template <class Rows>
  PURLIN_HD static int64_t before(int p, int64_t bound, Rows rows) {
    int64_t sum = 0;
    for (int k = 0; k < p; ++k) {
      const int64_t n = rows(k);
      sum += n < 0 ? 0 : n > bound ? bound + 1 : n;
    }
    return sum;
  }
};

}  // namespace purlin
