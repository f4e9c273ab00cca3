// A box plan: where the bytes that one rank sends to one peer lie on both sides, as strided boxes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/host_device.h"

namespace purlin {

inline constexpr int kMaxOuter = 3;

// The source and the destination box of a (sender, receiver) pair have the same contiguous run and
// the same outer extents, and differ in strides. The plan is the same for every pair: the block for
// receiver d starts at d * src_step in the sender's input, and what sender q sent lands at
// q * dst_step in the receiver's output. All figures are bytes; extents are counts, outermost
// first.
struct Plan {
  int64_t run = 0;
  int64_t src_step = 0;
  int64_t dst_step = 0;
  int64_t extent[kMaxOuter] = {1, 1, 1};
  int64_t src_stride[kMaxOuter] = {0, 0, 0};
  int64_t dst_stride[kMaxOuter] = {0, 0, 0};

  PURLIN_HD int64_t rows() const { return extent[0] * extent[1] * extent[2]; }
  PURLIN_HD int64_t bytes() const { return run * rows(); }
  PURLIN_HD bool contiguous() const { return rows() == 1; }

  // Whether a side's box has no gaps.
  PURLIN_HD bool is_packed(const int64_t (&stride)[kMaxOuter]) const {
    int64_t packed = run;
    for (int d = kMaxOuter; d-- > 0; packed *= extent[d])
      if (extent[d] != 1 && stride[d] != packed) return false;
    return true;
  }

  // The same runs from or to a box without gaps, in iteration order.
  PURLIN_HD Plan packed_source() const {
    Plan plan = *this;
    pack(plan.src_stride);
    return plan;
  }
  PURLIN_HD Plan packed_destination() const {
    Plan plan = *this;
    pack(plan.dst_stride);
    return plan;
  }

  // Byte offset, in the box with these strides, of row `row` in iteration order.
  PURLIN_HD int64_t row_offset(const int64_t (&stride)[kMaxOuter], int64_t row) const {
    return row_offset_as<int64_t>(stride, row);
  }

  // The same for a box of less than 4 GiB, without the code for larger ones.
  PURLIN_HD int64_t small_offset(const int64_t (&stride)[kMaxOuter], uint32_t linear) const {
    return contiguous() ? linear : offset_as<uint32_t>(stride, linear);
  }

  // Byte offset, in the box with these strides, of byte `linear` in iteration order.
  PURLIN_HD int64_t offset(const int64_t (&stride)[kMaxOuter], int64_t linear) const {
    if (contiguous()) return linear;
    if (bytes() <= UINT32_MAX) return offset_as<uint32_t>(stride, static_cast<uint32_t>(linear));
    return wide_offset(*this, stride, linear);
  }

  // The same for any box, by a call.
  PURLIN_COLD_HD static int64_t wide_offset(const Plan& plan, const int64_t (&stride)[kMaxOuter],
                                            uint64_t linear) {
    return plan.offset_as<uint64_t>(stride, linear);
  }

 private:
  PURLIN_HD void pack(int64_t (&stride)[kMaxOuter]) const {
    stride[2] = run;
    stride[1] = run * extent[2];
    stride[0] = run * extent[2] * extent[1];
  }

  // Divisions by 64-bit numbers cost a GPU five times those by 32-bit ones.
  template <class Index>
  PURLIN_HD int64_t row_offset_as(const int64_t (&stride)[kMaxOuter], Index row) const {
    if (extent[0] == 1 && extent[1] == 1) return row * stride[2];
    const Index inner = row % static_cast<Index>(extent[2]);
    const Index rest = row / static_cast<Index>(extent[2]);
    if (extent[0] == 1) return inner * stride[2] + rest * stride[1];
    const Index middle = rest % static_cast<Index>(extent[1]);
    const Index outer = rest / static_cast<Index>(extent[1]);
    return inner * stride[2] + middle * stride[1] + outer * stride[0];
  }
  template <class Index>
  PURLIN_HD int64_t offset_as(const int64_t (&stride)[kMaxOuter], Index linear) const {
    const Index width = static_cast<Index>(run);
    return row_offset_as<Index>(stride, linear / width) + linear % width;
  }
};

inline constexpr int64_t kShareUnit = 128;  // blocks divide a box in whole cache lines

PURLIN_HD inline int64_t whole_units(int64_t bytes) {
  return (bytes + kShareUnit - 1) / kShareUnit * kShareUnit;
}

// The part [begin, end) of `bytes` that share `index` of `count` works on, in whole units.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  PURLIN_HD int64_t bytes() const { return begin < end ? end - begin : 0; }
};

PURLIN_COLD_HD inline Range share(int64_t bytes, int64_t unit, int64_t count, int64_t index) {
  const int64_t units = (bytes + unit - 1) / unit;
  const int64_t base = units / count;
  const int64_t extra = units % count;
  const int64_t first = index * base + (index < extra ? index : extra);
  const int64_t last = first + base + (index < extra ? 1 : 0);
  const int64_t end = last * unit;
  return {first * unit, end < bytes ? end : bytes};
}

}  // namespace purlin
