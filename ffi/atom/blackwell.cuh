// The Atom of sm_100 and later: hopper's, with 32-byte accesses and two sums an instruction.
#pragma once

#include <type_traits>

#include "atom/hopper.cuh"

namespace purlin {

struct PairedMath {
  template <class Op, class Acc, int n>
  __device__ static void fold(Acc (&into)[n], const Acc (&next)[n]) {
    if constexpr (std::is_same_v<Op, Sum> && std::is_same_v<Acc, float> && n % 2 == 0) {
#pragma unroll
      for (int k = 0; k < n; k += 2) {
        const float2 sum = ptx::add_pair({into[k], into[k + 1]}, {next[k], next[k + 1]});
        into[k] = sum.x, into[k + 1] = sum.y;
      }
    } else {
      PlainMath::fold<Op>(into, next);
    }
  }
};

struct BlackwellAtom : Bulk<LoadStore<ptx::Wide, PairedMath>> {
  static constexpr const char* kName = "blackwell";
  static constexpr int kLeast = 100;
};

}  // namespace purlin
