// What one of several blocks moves of the operands of a call.
#pragma once

#include <cstdint>

#include "layout/plan.h"
#include "snac/call.h"

namespace purlin {

// Blocks share the operands as one run of bytes, so that most of them work on one operand alone,
// and all operands are on their way at once. whole(o) is the part of operand o that all blocks
// move.
template <class Whole>
class Portion {
 public:
  template <class Block>
  PURLIN_RANK Portion(const Block& block, int operands, Whole whole)
      : operands_(operands), whole_(whole) {
    int64_t total = 0;
    for (int o = 0; o < operands; ++o) total += whole_units(whole(o).bytes());
    own_ = share(total, kShareUnit, block.count(), block.index());
  }

  // Calls use(o, range) for each operand of which the block has something.
  template <class Use>
  PURLIN_RANK void for_each(Use use) const {
    int64_t first = 0;  // byte of the run where the operand begins
    for (int o = 0; o < operands_; ++o) {
      const Range all = whole_(o);
      const int64_t begin = own_.begin > first ? own_.begin - first : 0;
      const int64_t end = own_.end - first < all.bytes() ? own_.end - first : all.bytes();
      if (begin < end) use(o, Range{all.begin + begin, all.begin + end});
      first += whole_units(all.bytes());
    }
  }

 private:
  const int operands_;
  const Whole whole_;
  Range own_;
};

// The boxes of all operands.
template <class Packet>
PURLIN_RANK auto whole_boxes(const Call<Packet>& call) {
  return [&call](int o) { return Range{0, call.operand[o].plan.bytes()}; };
}

}  // namespace purlin
