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
    src_ = Plan::wide_offset(plan, plan.src_stride, at);
    dst_ = Plan::wide_offset(plan, plan.dst_stride, at);
    by_run_ = by.in_run, by_middle_ = by.middle, by_inner_ = by.inner;
    by_src_ = Plan::wide_offset(plan, plan.src_stride, step);
    by_dst_ = Plan::wide_offset(plan, plan.dst_stride, step);
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
    int64_t in_run, inner, middle;
  };
  PURLIN_COLD_HD static Place place(const Plan& plan, int64_t at) {
    const int64_t row = at / plan.run;
    return {at % plan.run, row % plan.extent[2], row / plan.extent[2] % plan.extent[1]};
  }

  const Plan& plan_;
  int64_t src_, dst_, in_run_, inner_, middle_;
  int64_t by_src_, by_dst_, by_run_, by_inner_, by_middle_;
};

}  // namespace purlin
