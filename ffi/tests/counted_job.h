// Counts for the stress programs: who sends how many rows to whom, uneven in many ways.
#pragma once

#include <cstdint>
#include <cstring>

#include "layout/collectives.h"
#include "snac/counts.h"

namespace purlin {

inline constexpr int kMaxRows = 48;

// The rows that each rank of a group sends to each other, in a call whose counts are data.
struct RowCounts {
  int rows_in = 0, rows_out = 0;
  bool wide = false, expects = false, placed = false, fill = false;
  int64_t rows[kMaxRanks][kMaxRanks] = {};  // [sender][receiver]
  int64_t send_at[kMaxRanks][kMaxRanks] = {}, receive_at[kMaxRanks][kMaxRanks] = {};

  // The arrays that rank r gives the call, one after another: sizes, expected, from, to. And where
  // the fifth, what it receives, is written.
  static constexpr int kArrays = 5;
  void write(int r, int world, char* at) const {
    for (int p = 0; p < world; ++p) {
      const int64_t each[] = {rows[r][p], rows[p][r], send_at[r][p], receive_at[r][p], -1};
      for (int a = 0; a < kArrays; ++a) put(at, a * world + p, each[a]);
    }
  }
  // As the call sees what was written to `at`.
  Counted counted(const Collective& row, int world, char* at) const {
    const auto array = [&](int a) { return at + a * world * (wide ? 8 : 4); };
    Counted of;
    of.sizes = array(0);
    of.expected = expects ? array(1) : nullptr;
    of.from = placed ? array(2) : nullptr;
    of.to = placed ? array(3) : nullptr;
    of.received = array(4);
    of.rows_in = of.most = rows_in;
    of.rows_out = rows_out;
    of.wide = wide;
    of.splits_input = row.splits_input();
    of.splits_output = row.splits_output();
    of.reduces = row.consume == Consume::kReduce;
    of.fill = fill;
    return of;
  }
  // Ranks from which `received` in what a call has left at `at` is wrong.
  int wrong(int r, int world, const char* at) const {
    int wrong = 0;
    for (int q = 0; q < world; ++q) {
      int64_t seen = 0;
      if (wide)
        seen = reinterpret_cast<const int64_t*>(at)[4 * world + q];
      else
        seen = reinterpret_cast<const int32_t*>(at)[4 * world + q];
      wrong += seen != rows[q][r];
    }
    return wrong;
  }

 private:
  void put(char* at, int i, int64_t value) const {
    if (wide)
      reinterpret_cast<int64_t*>(at)[i] = value;
    else
      reinterpret_cast<int32_t*>(at)[i] = static_cast<int32_t>(value);
  }
};

// Even and uneven counts: nobody, one sender, one receiver, each itself, a long stream in a ring of
// short ones, a few large ones, any. A rank sends at most kMaxRows rows in all.
template <class Pick>
RowCounts choose_counts(const Collective& row, int world, Pick pick) {
  RowCounts counts;
  const int most = row.splits_input() ? kMaxRows / world : kMaxRows;
  const int kind = pick(8), chosen = pick(world), other = pick(world), even = 1 + pick(most);
  const auto rows = [&](int s, int d) -> int64_t {
    switch (kind) {
      case 0: return even;
      case 1: return 0;
      case 2: return s == chosen ? pick(most + 1) : 0;
      case 3: return d == chosen ? pick(most + 1) : 0;
      case 4: return s == d ? pick(most + 1) : 0;
      case 5: return d == (s + 1) % world ? (s == chosen ? most : 1) : 0;
      case 6: return s == chosen && d == other ? most : pick(2);
      default: return pick(most + 1);
    }
  };
  for (int s = 0; s < world; ++s)
    for (int d = 0; d < world; ++d) counts.rows[s][d] = rows(s, d);
  // What is packed on both sides has one sender at most.
  const bool permutes = !row.splits_input() && !row.splits_output();
  for (int s = 0; s < world; ++s) {
    const int64_t first = counts.rows[s][0];
    for (int d = 0; d < world; ++d) {
      // Where all get the same, or all give the same, there is one count for them.
      if (!row.splits_input()) counts.rows[s][d] = first;
      if (permutes && d != (s + chosen) % world) counts.rows[s][d] = 0;
      if (row.consume == Consume::kReduce) counts.rows[s][d] = counts.rows[0][d];
    }
  }
  counts.wide = pick(2), counts.expects = pick(2), counts.fill = pick(2);
  counts.placed = row.splits_input() && row.splits_output() && pick(2);
  const int gap = counts.placed ? pick(3) : 0;  // rows before each that nobody writes
  for (int s = 0; s < world; ++s)
    for (int d = 0; d < world; ++d) {
      // Packed in the order of ranks; where the call says where, the other way round.
      const auto first = [&](int k, int n) { return counts.placed ? k > n : k < n; };
      for (int k = 0; k < world; ++k) {
        if (row.splits_input() && first(k, d)) counts.send_at[s][d] += counts.rows[s][k];
        if (row.splits_output() && first(k, s)) counts.receive_at[s][d] += counts.rows[k][d] + gap;
      }
      counts.receive_at[s][d] += gap;
    }
  for (int s = 0; s < world; ++s)
    for (int d = 0; d < world; ++d) {
      const auto in = static_cast<int>(counts.send_at[s][d] + counts.rows[s][d]);
      const auto out = static_cast<int>(counts.receive_at[s][d] + counts.rows[s][d]);
      counts.rows_in = in > counts.rows_in ? in : counts.rows_in;
      counts.rows_out = out > counts.rows_out ? out : counts.rows_out;
    }
  counts.rows_in += pick(2);
  counts.rows_out += pick(4);
  return counts;
}

}  // namespace purlin
