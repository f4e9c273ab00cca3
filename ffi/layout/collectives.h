// The table of collectives: each row is an input layout, an output layout and what a consumer does.
#pragma once

#include <cstdint>
#include <string_view>

namespace purlin {

// How one rank's array relates to its peers.
//   packed      the whole array belongs to the one rank that holds it
//   scattered   block p along an axis belongs to peer p
//   transposed  block p along an axis is what peer p addressed to the holder
//
// Blocks are even pieces of an axis, or as many rows of the leading axis as counts say that are
// data of the program.
enum class Layout : uint8_t { kPacked, kScattered, kTransposed };

enum class Consume : uint8_t { kCopy, kReduce };

struct Collective {
  std::string_view name;
  Layout input;
  Layout output;
  Consume consume;
  bool counted = false;

  constexpr bool splits_input() const { return input != Layout::kPacked; }
  constexpr bool splits_output() const { return output != Layout::kPacked; }
  // Every rank gets the same result.
  constexpr bool is_uniform() const { return !splits_input() && !splits_output() && !counted; }
};

inline constexpr Collective kCollectives[] = {
    {"all_gather", Layout::kPacked, Layout::kScattered, Consume::kCopy},
    {"reduce_scatter", Layout::kScattered, Layout::kPacked, Consume::kReduce},
    {"all_to_all", Layout::kScattered, Layout::kTransposed, Consume::kCopy},
    {"all_reduce", Layout::kPacked, Layout::kPacked, Consume::kReduce},
    {"all_gather_v", Layout::kPacked, Layout::kScattered, Consume::kCopy, true},
    {"reduce_scatter_v", Layout::kScattered, Layout::kPacked, Consume::kReduce, true},
    {"all_to_all_v", Layout::kScattered, Layout::kTransposed, Consume::kCopy, true},
    {"ppermute", Layout::kPacked, Layout::kPacked, Consume::kCopy, true},  // counts of 0 and all
};
inline constexpr int kNumCollectives = sizeof(kCollectives) / sizeof(kCollectives[0]);

// Row number of `name`, or -1.
constexpr int find_collective(std::string_view name) {
  for (int i = 0; i < kNumCollectives; ++i)
    if (kCollectives[i].name == name) return i;
  return -1;
}

}  // namespace purlin
