// Derives the box plan of a collective from its row of the table, a shape and a world size.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/collectives.h"
#include "layout/plan.h"

namespace purlin {

struct Axes {
  int split = 0;   // axis of the input that is cut into one block for each peer
  int concat = 0;  // axis of the output along which the peers' blocks lie
};

// Shape of the result for `input` (both local to a rank). Throws std::invalid_argument.
std::vector<int64_t> result_shape(const Collective& row, const std::vector<int64_t>& input,
                                  int world, Axes axes);

// The plan for arrays in row-major order. Throws std::invalid_argument.
Plan derive(const Collective& row, const std::vector<int64_t>& input, int64_t item_bytes, int world,
            Axes axes);

}  // namespace purlin
