// A place in both boxes of a plan that moves on in equal steps without dividing.
#pragma once

#include <cstdint>

#include "layout/plan.h"

namespace purlin {

class Cursor {
 public:
  // At byte `at` in iteration order; each next() goes `step` bytes further.
  PURLIN_HD Cursor(const Plan& plan, int64_t at, int64_t step) : plan_(plan) {
    const Place start = place(plan, at), by = place(plan, step);
    in_run_ = start.in_run, middle_ = start.middle, inner_ = start.inner;
    src_ = offset(start, plan.src_stride), dst_ = offset(start, plan.dst_stride);
    by_run_ = by.in_run, by_middle_ = by.middle, by_inner_ = by.inner;
    by_src_ = offset(by, plan.src_stride), by_dst_ = offset(by, plan.dst_stride);
  }

  PURLIN_HD int64_t src() const { return src_; }
  PURLIN_HD int64_t dst() const { return dst_; }

  PURLIN_HD void next() {
    src_ += by_src_;
    dst_ += by_dst_;
    in_run_ += by_run_;
    inner_ += by_inner_;
    middle_ += by_middle_;
    if (in_run_ >= plan_.run) {
      in_run_ -= plan_.run;
      ++inner_;
      src_ += plan_.src_stride[2] - plan_.run;
      dst_ += plan_.dst_stride[2] - plan_.run;
    }
    if (inner_ >= plan_.extent[2]) {
      inner_ -= plan_.extent[2];
      ++middle_;
      src_ += plan_.src_stride[1] - plan_.extent[2] * plan_.src_stride[2];
      dst_ += plan_.dst_stride[1] - plan_.extent[2] * plan_.dst_stride[2];
    }
    if (middle_ >= plan_.extent[1]) {
      middle_ -= plan_.extent[1];
      src_ += plan_.src_stride[0] - plan_.extent[1] * plan_.src_stride[1];
      dst_ += plan_.dst_stride[0] - plan_.extent[1] * plan_.dst_stride[1];
    }
  }

 private:
  struct Place {
    int64_t in_run, inner, middle, outer;
  };
  // A GPU divides 32-bit numbers five times as fast.
  PURLIN_COLD_HD static Place place(const Plan& plan, int64_t at) {
    return plan.bytes() <= UINT32_MAX && at <= UINT32_MAX ? place_as<uint32_t>(plan, at)
                                                          : place_as<uint64_t>(plan, at);
  }
  template <class Index>
  PURLIN_HD static Place place_as(const Plan& plan, int64_t at) {
    const Index run = plan.run, inner = plan.extent[2], middle = plan.extent[1];
    const Index row = static_cast<Index>(at) / run, block = row / inner, outer = block / middle;
    return {static_cast<int64_t>(static_cast<Index>(at) - row * run),
            static_cast<int64_t>(row - block * inner), static_cast<int64_t>(block - outer * middle),
            static_cast<int64_t>(outer)};
  }
  PURLIN_HD static int64_t offset(const Place& at, const int64_t (&stride)[kMaxOuter]) {
    return at.in_run + at.inner * stride[2] + at.middle * stride[1] + at.outer * stride[0];
  }

  const Plan& plan_;
  int64_t src_, dst_, in_run_, inner_, middle_;
  int64_t by_src_, by_dst_, by_run_, by_inner_, by_middle_;
};

}  // namespace purlin
