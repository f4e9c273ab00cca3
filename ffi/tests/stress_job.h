// What the stress programs run and how they know that it was right, for host and GPUs alike.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "layout/derive.h"
#include "layout/dtypes.h"
#include "snac/call.h"
#include "snac/regimes.h"

namespace purlin {

inline constexpr int64_t kMaxItems = 3 * 5 * 7 * 16;  // of one block, with every factor at its most

struct Shape {
  std::vector<int64_t> local;  // input of one rank
  Axes axes;
};

// One collective that all ranks will run, chosen from data they share.
struct Job {
  int row;
  Regime regime;
  bool half_floats;  // bf16 instead of f32
  int operands;
  Shape shape[kMaxOperands];
};

inline Job choose(uint64_t seed, int world) {
  std::mt19937_64 random(seed);
  auto pick = [&](int n) { return static_cast<int>(random() % n); };
  Job job;
  job.row = pick(kNumCollectives);
  job.regime = pick(2) ? Regime::kPacket : Regime::kZeroStaging;
  job.half_floats = pick(2);
  job.operands = 1 + pick(3);
  for (int o = 0; o < job.operands; ++o) {
    Shape& shape = job.shape[o];
    shape.local = {1 + pick(3), 1 + pick(5), 1 + pick(7)};
    shape.axes = {pick(3), pick(3)};
    const int64_t factor = 1 + pick(pick(4) == 0 ? 16 : 2);
    shape.local[pick(3)] *= factor;
    if (kCollectives[job.row].splits_input()) shape.local[shape.axes.split] *= world;
  }
  return job;
}

// Small integers: their sums are exact in every order and in bf16 (up to 16 ranks of at most 15).
inline int value_of(int call, int operand, int rank, int64_t index) {
  return static_cast<int>((call * 7 + operand * 5 + rank * 3 + index) % 16);
}

inline int64_t items_of(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

inline int64_t item_bytes(const Job& job) { return job.half_floats ? 2 : 4; }

inline float get_item(const Job& job, const char* at, int64_t i) {
  return job.half_floats ? widen(reinterpret_cast<const Bfloat16*>(at)[i])
                         : reinterpret_cast<const float*>(at)[i];
}

// Writes rank r's operand o of call n to `at`.
inline void fill_input(const Job& job, int n, int o, int r, char* at) {
  const int64_t items = items_of(job.shape[o].local);
  for (int64_t i = 0; i < items; ++i) {
    const auto v = static_cast<float>(value_of(n, o, r, i));
    if (job.half_floats)
      reinterpret_cast<Bfloat16*>(at)[i] = narrow<Bfloat16>(v);
    else
      reinterpret_cast<float*>(at)[i] = v;
  }
}

// Number of wrong values in rank r's result o of call n; prints the first. The oracle indexes
// arrays by coordinates and knows nothing of plans.
inline int64_t count_wrong(const Job& job, int n, int o, int r, int world, const char* result) {
  const Collective& row = kCollectives[job.row];
  const auto& in = job.shape[o].local;
  const auto out = result_shape(row, in, world, job.shape[o].axes);
  const auto [split, concat] = job.shape[o].axes;
  const int64_t in_block = row.splits_input() ? in[split] / world : 0;
  const int64_t out_block = row.splits_output() ? out[concat] / world : 0;
  int64_t wrong = 0;
  for (int64_t i = 0; i < items_of(out); ++i) {
    int64_t at[3] = {i / (out[1] * out[2]), i / out[2] % out[1], i % out[2]};
    int from = -1;  // one sender, or all
    if (row.splits_output()) {
      from = static_cast<int>(at[concat] / out_block);
      at[concat] %= out_block;
    }
    if (row.splits_input()) at[split] += r * in_block;
    const int64_t index = (at[0] * in[1] + at[1]) * in[2] + at[2];
    float expected = 0;
    for (int q = 0; q < world; ++q)
      if (from < 0 || from == q) expected += static_cast<float>(value_of(n, o, q, index));
    const float seen = get_item(job, result, i);
    if (seen != expected && wrong++ == 0)
      std::fprintf(stderr, "call %d %s regime %d rank %d operand %d [%ld]: %g, expected %g\n", n,
                   std::string(row.name).c_str(), static_cast<int>(job.regime), r, o,
                   static_cast<long>(i), seen, expected);
  }
  return wrong;
}

}  // namespace purlin
