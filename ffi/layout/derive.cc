// Box plans: the common refinement of the input's and the output's row-major order, collapsed.
#include "layout/derive.h"

#include <stdexcept>
#include <string>

namespace purlin {
namespace {

void check_axis(const char* what, int axis, size_t rank) {
  if (axis < 0 || static_cast<size_t>(axis) >= rank)
    throw std::invalid_argument(std::string(what) + " axis " + std::to_string(axis) +
                                " is outside an array of rank " + std::to_string(rank));
}

// Shape of what one rank sends to one peer.
std::vector<int64_t> block_shape(const Collective& row, std::vector<int64_t> shape, int world,
                                 Axes axes) {
  if (row.counted && shape.empty())
    throw std::invalid_argument("a scalar has no rows that could be counted");
  if (!row.splits_input() || row.counted) return shape;
  check_axis("split", axes.split, shape.size());
  if (shape[axes.split] % world != 0)
    throw std::invalid_argument("axis " + std::to_string(axes.split) + " of size " +
                                std::to_string(shape[axes.split]) + " does not divide over " +
                                std::to_string(world) + " ranks");
  shape[axes.split] /= world;
  return shape;
}

std::vector<int64_t> row_major_strides(const std::vector<int64_t>& shape, int64_t item_bytes) {
  std::vector<int64_t> stride(shape.size());
  int64_t next = item_bytes;
  for (size_t d = shape.size(); d-- > 0;) {
    stride[d] = next;
    next *= shape[d];
  }
  return stride;
}

}  // namespace

std::vector<int64_t> result_shape(const Collective& row, const std::vector<int64_t>& input,
                                  int world, Axes axes, int64_t rows) {
  std::vector<int64_t> shape = block_shape(row, input, world, axes);
  if (row.counted) {
    shape[0] = rows;
  } else if (row.splits_output()) {
    check_axis("concat", axes.concat, shape.size());
    shape[axes.concat] *= world;
  }
  return shape;
}

Plan derive(const Collective& row, const std::vector<int64_t>& input, int64_t item_bytes, int world,
            Axes axes) {
  const std::vector<int64_t> block = block_shape(row, input, world, axes);
  const std::vector<int64_t> output = row.counted ? block : result_shape(row, input, world, axes);
  const std::vector<int64_t> src = row_major_strides(input, item_bytes);
  const std::vector<int64_t> dst = row_major_strides(output, item_bytes);

  Plan plan;
  if (row.splits_input() && !row.counted) plan.src_step = block[axes.split] * src[axes.split];
  if (row.splits_output() && !row.counted) plan.dst_step = block[axes.concat] * dst[axes.concat];

  // From the innermost dimension outwards, a dimension joins the group inside it where that keeps
  // both sides regular. Group -1 is the contiguous run.
  plan.run = item_bytes;
  int64_t size = item_bytes, src_unit = 1, dst_unit = 1;  // of the group being grown
  int64_t extent[kMaxOuter + 1] = {}, src_stride[kMaxOuter + 1] = {},
                             dst_stride[kMaxOuter + 1] = {};
  int groups = 0;
  for (size_t d = block.size(); d-- > 0;) {
    if (block[d] == 1) continue;
    if (src[d] == size * src_unit && dst[d] == size * dst_unit) {
      size *= block[d];
    } else {
      if (++groups > kMaxOuter) throw std::invalid_argument("the layout needs too many strides");
      size = block[d];
      src_unit = src_stride[groups] = src[d];
      dst_unit = dst_stride[groups] = dst[d];
    }
    (groups == 0 ? plan.run : extent[groups]) = size;
  }
  for (int g = 1; g <= groups; ++g) {
    plan.extent[kMaxOuter - g] = extent[g];
    plan.src_stride[kMaxOuter - g] = src_stride[g];
    plan.dst_stride[kMaxOuter - g] = dst_stride[g];
  }
  return plan;
}

}  // namespace purlin
