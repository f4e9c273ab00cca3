// The two views of a box as a row of packet-sized words: one contiguous run, or any strided box of
// less than 4 GiB.
#pragma once

#include <cstdint>
#include <cstring>

#include "layout/plan.h"

namespace purlin {

// Words that hold a box, the last of them perhaps in part.
template <class Word>
PURLIN_HD int64_t words_of(const Plan& plan) {
  constexpr int64_t kBytes = sizeof(Word);
  return (plan.bytes() + kBytes - 1) / kBytes;
}

// A contiguous run of whole, aligned words. It has a view of its own since its code is short, and a
// GPU fetches the code of each call anew.
template <class Word, class Byte>
class FlatWords {
 public:
  PURLIN_RANK FlatWords(Byte* base, const Plan&, const int64_t (&)[kMaxOuter]) : base_(base) {}

  PURLIN_HD static int count(const Plan& plan) {
    return static_cast<int>(static_cast<uint32_t>(plan.run) / sizeof(Word));
  }

  template <class Atom>
  PURLIN_RANK Word load(int i) const {
    return Atom::load(reinterpret_cast<const Word*>(base_) + i);
  }
  PURLIN_RANK void store(int i, Word word) const { reinterpret_cast<Word*>(base_)[i] = word; }

 private:
  Byte* base_;
};

// Whether the boxes of both sides are such runs, for all peers.
template <class Word>
bool is_flat(const char* src, const char* dst, const Plan& plan) {
  const int64_t all = reinterpret_cast<int64_t>(src) | reinterpret_cast<int64_t>(dst) | plan.run |
                      plan.src_step | plan.dst_step;
  return plan.contiguous() && all % static_cast<int64_t>(sizeof(Word)) == 0;
}

// Any box, whatever its alignment.
template <class Word, class Byte>
class Words {
 public:
  PURLIN_RANK Words(Byte* base, const Plan& plan, const int64_t (&stride)[kMaxOuter])
      : base_(base), plan_(plan), stride_(stride) {
    int64_t all = reinterpret_cast<int64_t>(base) | plan.run;
    if (!plan.contiguous()) all |= stride[0] | stride[1] | stride[2];
    whole_ = all % kBytes == 0;
  }

  PURLIN_HD static int count(const Plan& plan) { return static_cast<int>(words_of<Word>(plan)); }

  // Calls, so that a kernel's code stays small.
  template <class Atom>
  PURLIN_RANK Word load(int i) const {
    return load_any(base_, plan_, stride_, whole_, i);
  }
  PURLIN_RANK void store(int i, Word word) const {
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
};

}  // namespace purlin
