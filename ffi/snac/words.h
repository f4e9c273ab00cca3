// A strided box of less than 4 GiB seen as a row of packet-sized words, whatever its alignment.
#pragma once

#include <cstdint>
#include <cstring>

#include "layout/plan.h"

namespace purlin {

template <class Word, class Byte>
class Words {
 public:
  PURLIN_RANK Words(Byte* base, const Plan& plan, const int64_t (&stride)[kMaxOuter])
      : base_(base), plan_(plan), stride_(stride) {
    int64_t all = reinterpret_cast<int64_t>(base) | plan.run;
    if (!plan.contiguous()) all |= stride[0] | stride[1] | stride[2];
    whole_ = all % kBytes == 0;
    flat_ = whole_ && plan.contiguous();
  }

  PURLIN_HD static int64_t count(const Plan& plan) { return (plan.bytes() + kBytes - 1) / kBytes; }

  // The common case stays short; the others are calls, so that a kernel's code stays small.
  PURLIN_RANK Word load(int64_t i) const {
    if (flat_) return reinterpret_cast<const Word*>(base_)[i];
    return load_any(base_, plan_, stride_, whole_, i);
  }
  PURLIN_RANK void store(int64_t i, Word word) const {
    if (flat_)
      reinterpret_cast<Word*>(base_)[i] = word;
    else
      store_any(base_, plan_, stride_, whole_, i, word);
  }

 private:
  static constexpr int64_t kBytes = sizeof(Word);
  using Strides = int64_t[kMaxOuter];

  PURLIN_COLD static Word load_any(const Byte* base, const Plan& plan, const Strides& stride,
                                   bool whole, int64_t i) {
    if (whole)
      return *reinterpret_cast<const Word*>(
          base + plan.small_offset(stride, static_cast<uint32_t>(i * kBytes)));
    Word word = 0;
    for (int64_t at = i * kBytes, shift = 0; shift < 8 * kBytes && at < plan.bytes();
         ++at, shift += 8)
      word |= static_cast<Word>(
                  static_cast<uint8_t>(base[plan.small_offset(stride, static_cast<uint32_t>(at))]))
              << shift;
    return word;
  }

  PURLIN_COLD static void store_any(Byte* base, const Plan& plan, const Strides& stride, bool whole,
                                    int64_t i, Word word) {
    if (whole) {
      *reinterpret_cast<Word*>(base +
                               plan.small_offset(stride, static_cast<uint32_t>(i * kBytes))) = word;
      return;
    }
    for (int64_t at = i * kBytes, shift = 0; shift < 8 * kBytes && at < plan.bytes();
         ++at, shift += 8)
      base[plan.small_offset(stride, static_cast<uint32_t>(at))] = static_cast<Byte>(word >> shift);
  }

  Byte* base_;
  const Plan& plan_;
  const int64_t (&stride_)[kMaxOuter];
  bool whole_;  // every word is an aligned piece of one run
  bool flat_;   // and there is one run
};

}  // namespace purlin
