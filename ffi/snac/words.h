// A strided box seen as a row of packet-sized words, whatever its alignment.
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
  }

  PURLIN_HD static int64_t count(const Plan& plan) { return (plan.bytes() + kBytes - 1) / kBytes; }

  PURLIN_RANK Word load(int64_t i) const {
    if (whole_) return *reinterpret_cast<const Word*>(base_ + plan_.offset(stride_, i * kBytes));
    Word word = 0;
    for_bytes(i, [&](int shift, const Byte* at) {
      word |= static_cast<Word>(static_cast<uint8_t>(*at)) << shift;
    });
    return word;
  }

  PURLIN_RANK void store(int64_t i, Word word) const {
    if (whole_) {
      *reinterpret_cast<Word*>(base_ + plan_.offset(stride_, i * kBytes)) = word;
      return;
    }
    for_bytes(i, [&](int shift, Byte* at) { *at = static_cast<Byte>(word >> shift); });
  }

 private:
  static constexpr int64_t kBytes = sizeof(Word);

  template <class F>
  PURLIN_RANK void for_bytes(int64_t i, F f) const {
    const int64_t begin = i * kBytes;
    for (int64_t at = begin; at < begin + kBytes && at < plan_.bytes(); ++at)
      f(static_cast<int>(8 * (at - begin)), base_ + plan_.offset(stride_, at));
  }

  Byte* base_;
  const Plan& plan_;
  const int64_t (&stride_)[kMaxOuter];
  bool whole_;
};

}  // namespace purlin
