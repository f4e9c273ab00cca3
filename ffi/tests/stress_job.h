// What the stress programs run and how they know that it was right, for host and GPUs alike.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "atom/tag.h"
#include "layout/derive.h"
#include "layout/dtypes.h"
#include "snac/call.h"
#include "snac/regime.h"
#include "tests/counted_job.h"

namespace purlin {

// Of one block: with every factor at its most, and for 48 + 5 rows of 5 * 7 where counts are data.
inline constexpr int64_t kMaxItems = 3 * 5 * 7 * 18;

struct Shape {
  std::vector<int64_t> local;  // input of one rank
  Axes axes;
};

// Elements that a job moves: numbers whose sums are exact, or integers that look like flags and
// packets of the calls around (copies alone).
enum class Items { kFloat, kHalf, kShort, kFlags };

// Who talks to whom: all ranks, two halves, or those of even and of odd number.
enum class Partition { kAll, kHalves, kParity };
inline constexpr int kNumPartitions = 3;

// One collective that all ranks will run, chosen from data they share.
struct Job {
  int row;
  Regime regime;
  Items items;
  Partition partition;
  int world;    // ranks of a group
  int blocks;   // of each rank
  int staging;  // bytes of a half that it may use; 0: all
  bool in_place;
  int operands;
  Shape shape[kMaxOperands];
  int packet_bytes = 0;  // of a stream that travels in packets
  RowCounts counts;      // of collectives whose counts are data

  const Collective& collective() const { return kCollectives[row]; }
  // Group and rank in it of one of `all` ranks.
  int group(int r, int all) const {
    if (partition == Partition::kAll) return 0;
    return partition == Partition::kHalves ? r / (all / 2) : r % 2;
  }
  int rank(int r, int all) const {
    if (partition == Partition::kAll) return r;
    return partition == Partition::kHalves ? r % (all / 2) : r / 2;
  }
  // The other way round.
  int member(int group, int rank, int all) const {
    if (partition == Partition::kAll) return rank;
    return partition == Partition::kHalves ? group * (all / 2) + rank : rank * 2 + group;
  }
  // What find_fold and with_consumer call the elements.
  const char* dtype() const {
    return items == Items::kHalf ? "bfloat16" : items == Items::kShort ? "int16" : "float32";
  }
};

inline Job choose(uint64_t seed, int ranks, int blocks, bool lines) {
  std::mt19937_64 random(seed);
  auto pick = [&](int n) { return static_cast<int>(random() % n); };
  Job job;
  job.row = pick(kNumCollectives);
  const Collective& row = kCollectives[job.row];
  do {
    job.regime =
        static_cast<Regime>(1 + pick(kNumRegimes - 1));  // all but kMeet, which never waits
  } while (!fits(job.regime, row) || (job.regime == Regime::kLine && !lines));
  job.items = static_cast<Items>(pick(row.consume == Consume::kCopy ? 4 : 3));
  job.partition = static_cast<Partition>(ranks % 2 == 0 ? pick(kNumPartitions) : 0);
  job.world = job.partition == Partition::kAll ? ranks : ranks / 2;
  job.blocks = 1 + pick(blocks);
  job.operands = 1 + pick(3);
  job.in_place = in_place(job.regime, row) && pick(2);
  // Just enough for a round of a few lines, or all of it.
  job.staging = pick(2) ? 0
                        : job.blocks * static_cast<int>(kShareUnit) *
                              (job.operands * job.world * (1 + pick(2)) + 1 + pick(4));
  if (row.counted) job.counts = choose_counts(row, job.world, pick);
  job.packet_bytes = pick(2) ? 0 : pick(2000);
  for (int o = 0; o < job.operands; ++o) {
    Shape& shape = job.shape[o];
    if (row.counted) {
      shape = {{job.counts.rows_in, 1 + pick(5), 1 + pick(7)}, {}};
      continue;
    }
    shape.local = {1 + pick(3), 1 + pick(5), 1 + pick(7)};
    shape.axes = {pick(3), pick(3)};
    const int64_t factor = 1 + pick(pick(4) == 0 ? 16 : 2);
    shape.local[pick(3)] *= factor;
    if (row.splits_input()) shape.local[shape.axes.split] *= job.world;
  }
  return job;
}

inline int64_t items_of(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

inline int64_t item_bytes(const Job& job) {
  return job.items == Items::kFlags ? 8 : job.items == Items::kFloat ? 4 : 2;
}

// Value of an element. Small integers: their sums are exact in every order and in bf16 (up to 16
// ranks of at most 15).
inline int64_t value_of(const Job& job, int call, int operand, int rank, int64_t index) {
  if (job.items == Items::kFlags) {
    const int64_t epoch = call + index % 5 - 2;  // near that of the call, in every place of a flag
    return index % 3 == 0 ? epoch << 32 | epoch : epoch << kTagBits | (call % 7 + 1 + rank % 2);
  }
  return (call * 7 + operand * 5 + rank * 3 + index) % 16;
}

inline int64_t get_item(const Job& job, const char* at, int64_t i) {
  switch (job.items) {
    case Items::kFlags: return reinterpret_cast<const int64_t*>(at)[i];
    case Items::kHalf: return static_cast<int64_t>(widen(reinterpret_cast<const Bfloat16*>(at)[i]));
    case Items::kShort: return reinterpret_cast<const int16_t*>(at)[i];
    case Items::kFloat: break;
  }
  return static_cast<int64_t>(reinterpret_cast<const float*>(at)[i]);
}

// The operand o of a call of this job, at these places.
inline Operand operand_of(const Job& job, int o, const char* src, char* dst) {
  const Shape& shape = job.shape[o];
  const int64_t row_bytes = shape.local[1] * shape.local[2] * item_bytes(job);
  const Plan plan = derive(job.collective(), shape.local, item_bytes(job), job.world, shape.axes);
  return {src, dst, plan, row_bytes};
}

// Writes rank r's operand o of call n to `at`.
inline void fill_input(const Job& job, int n, int o, int r, char* at) {
  const int64_t items = items_of(job.shape[o].local);
  for (int64_t i = 0; i < items; ++i) {
    const int64_t v = value_of(job, n, o, r, i);
    switch (job.items) {
      case Items::kFlags: reinterpret_cast<int64_t*>(at)[i] = v; break;
      case Items::kHalf:
        reinterpret_cast<Bfloat16*>(at)[i] = narrow<Bfloat16>(static_cast<float>(v));
        break;
      case Items::kShort: reinterpret_cast<int16_t*>(at)[i] = static_cast<int16_t>(v); break;
      case Items::kFloat: reinterpret_cast<float*>(at)[i] = static_cast<float>(v);
    }
  }
}

constexpr int kUntouched = 0x55;  // every byte of a result before the call

// What item i of rank r's result o should be where counts are data; `as_before` if nothing should
// have been written there.
inline int64_t expected_item(const Job& job, int n, int o, int r, const std::vector<int>& ids,
                             int64_t i, bool* as_before) {
  const RowCounts& of = job.counts;
  const auto& in = job.shape[o].local;
  const int64_t width = in[1] * in[2], row = i / width;
  int64_t sum = 0;
  *as_before = !of.fill;
  for (int q = 0; q < job.world; ++q) {
    const int64_t at = row - of.receive_at[q][r];
    if (at < 0 || at >= of.rows[q][r]) continue;
    *as_before = false;
    sum += value_of(job, n, o, ids[q], (of.send_at[q][r] + at) * width + i % width);
  }
  return sum;
}

// Number of wrong values in rank r's result o of call n; prints the first. `ids` are the numbers
// with which the ranks of the group have filled their inputs. The oracle indexes arrays by
// coordinates and knows nothing of plans.
inline int64_t count_wrong(const Job& job, int n, int o, int r, const std::vector<int>& ids,
                           const char* result) {
  const int world = job.world;
  const Collective& row = kCollectives[job.row];
  const auto& in = job.shape[o].local;
  const auto out = result_shape(row, in, world, job.shape[o].axes, job.counts.rows_out);
  const auto [split, concat] = job.shape[o].axes;
  const int64_t in_block = row.splits_input() ? in[split] / world : 0;
  const int64_t out_block = row.splits_output() ? out[concat] / world : 0;
  int64_t wrong = 0;
  for (int64_t i = 0; i < items_of(out); ++i) {
    int64_t at[3] = {i / (out[1] * out[2]), i / out[2] % out[1], i % out[2]};
    int from = -1;  // one sender, or all
    if (row.splits_output() && !row.counted) {
      from = static_cast<int>(at[concat] / out_block);
      at[concat] %= out_block;
    }
    if (row.splits_input() && !row.counted) at[split] += r * in_block;
    const int64_t index = (at[0] * in[1] + at[1]) * in[2] + at[2];
    int64_t expected = 0;
    bool as_before = false;
    if (row.counted)
      expected = expected_item(job, n, o, r, ids, i, &as_before);
    else
      for (int q = 0; q < world; ++q)
        if (from < 0 || from == q) expected += value_of(job, n, o, ids[q], index);
    int64_t seen = get_item(job, result, i);
    if (as_before) {
      char before[8];
      std::memset(before, kUntouched, sizeof before);
      seen = std::memcmp(result + i * item_bytes(job), before, item_bytes(job));
    }
    if (seen != expected && wrong++ == 0)
      std::fprintf(stderr, "call %d %s %s rank %d operand %d [%ld]: %ld, expected %ld\n", n,
                   std::string(row.name).c_str(), kRegimeNames[static_cast<int>(job.regime)], r, o,
                   static_cast<long>(i), static_cast<long>(seen), static_cast<long>(expected));
  }
  return wrong;
}

}  // namespace purlin
