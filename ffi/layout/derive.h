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

// Shape of the result for `input` (both local to a rank); `rows` of them where counts are data.
// Throws std::invalid_argument.
std::vector<int64_t> result_shape(const Collective& row, const std::vector<int64_t>& input,
                                  int world, Axes axes, int64_t rows = 0);

// The plan for arrays in row-major order; where counts are data, for the most that one rank may
// send another: all its rows. Throws std::invalid_argument.
Plan derive(const Collective& row, const std::vector<int64_t>& input, int64_t item_bytes, int world,
            Axes axes);

}  // namespace purlin
