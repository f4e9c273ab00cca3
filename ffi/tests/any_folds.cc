// The reductions that the kernels share, compiled for the host, against the host's own: every
// operator and type, worlds that round between ranks or do not, ends and alignments of all kinds.
//
//   any_folds
//
// cuda_folds runs the same code on a GPU.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "atom/pair.h"
#include "layout/cursor.h"
#include "snac/host_reduce.h"
#include "tests/same_values.h"

#define __device__
#define __noinline__ __attribute__((noinline))

namespace purlin::ptx {

template <class V>
V load(const char* at) {
  V v;
  std::memcpy(&v, at, sizeof v);
  return v;
}
template <class V>
void store(char* at, const V& v) {
  std::memcpy(at, &v, sizeof v);
}

}  // namespace purlin::ptx

#include "snac/any_reduce.cuh"

namespace purlin {
namespace {

constexpr int kThreads = 96, kMost = 8;

struct Thread {
  int index;
  int thread() const { return index; }
  int threads() const { return kThreads; }
};

// The reductions that the kernels hand to their Atom.
struct ItemAtom {
  template <class T, class Acc, class Op>
  static void reduce(const Thread& own, char* dst, const char* const* src, int world,
                     const Plan& plan, Range range) {
    constexpr int64_t kBytes = sizeof(T);
    for (int64_t at = range.begin + own.thread() * kBytes; at < range.end;
         at += kThreads * kBytes) {
      const int64_t from = plan.offset(plan.src_stride, at);
      Acc acc = widen(ptx::load<T>(src[0] + from));
      for (int q = 1; q < world; ++q) acc = Op::fold(acc, widen(ptx::load<T>(src[q] + from)));
      ptx::store(dst + plan.offset(plan.dst_stride, at), narrow<T>(acc));
    }
  }
};

struct Case {
  int world;
  Plan plan;
  int64_t shift;  // of the arrays' first bytes
  Range part;
};

// Items whose place, or whose lack of one, is wrong.
template <class T>
int64_t wrong_items(const char* op, const char* dtype, const Case& given) {
  constexpr int64_t kBytes = sizeof(T);
  const Plan& plan = given.plan;
  const int64_t room = plan.contiguous() ? plan.run : plan.extent[2] * plan.src_stride[2];
  std::mt19937_64 random(1);
  std::vector<std::vector<char>> inputs(given.world);
  const char *from[kMost], *packed_from[kMost];
  std::vector<std::vector<char>> packed(given.world);
  for (int q = 0; q < given.world; ++q) {
    inputs[q].resize(room + 32);
    for (char& c : inputs[q])
      c = static_cast<char>(std::string(dtype) == "bool" ? random() & 1 : random());
    from[q] = inputs[q].data() + given.shift;
    for (int64_t at = 0; at < plan.bytes(); ++at)
      packed[q].push_back(from[q][plan.offset(plan.src_stride, at)]);
    packed_from[q] = packed[q].data();
  }
  std::vector<char> expected(plan.bytes()), found(room + 32, 0), taken;
  find_fold(op, dtype).fold(expected.data(), packed_from, given.world, 0, plan.bytes() / kBytes);

  Call<Pair> call;
  call.world = given.world;
  call.fold = find_fold_number(op, dtype);
  call.item_bytes = kBytes;
  Operand& operand = call.operand[0];
  operand.plan = plan;
  operand.dst = found.data() + given.shift;
  for (int t = 0; t < kThreads; ++t)
    AnyReduce<ItemAtom>().pull(*std::make_unique<Thread>(Thread{t}), call, operand, from,
                               given.part);
  for (int64_t at = 0; at < plan.bytes(); ++at)
    taken.push_back(operand.dst[plan.offset(plan.dst_stride, at)]);
  for (int64_t at = 0; at < plan.bytes(); ++at)  // nothing outside the part
    if ((at < given.part.begin || at >= given.part.end) && taken[at] != 0) return -1;
  const int64_t items = (given.part.end - given.part.begin) / kBytes;
  return differing<T>(taken.data() + given.part.begin, expected.data() + given.part.begin, items);
}

std::vector<Case> cases(int64_t item_bytes) {
  std::vector<Case> all;
  for (int world : {1, 2, 3, kMost})
    for (int64_t items : {1, 7, 64, 4099}) {
      Plan plan;
      plan.run = items * item_bytes;
      const int64_t begin = plan.run / 48 * 16;  // as blocks share a run
      for (int64_t shift : {int64_t{0}, std::min(item_bytes, int64_t{8})})
        for (Range part : {Range{0, plan.run}, {begin, plan.run}, {0, begin}})
          all.push_back({world, plan, shift, part});
    }
  Plan rows;
  rows.run = 3 * std::max(item_bytes, int64_t{16});
  rows.extent[2] = 5;
  rows.src_stride[2] = rows.dst_stride[2] = rows.run + 16;
  all.push_back({3, rows, 0, {0, rows.bytes()}});
  rows.run -= item_bytes;
  all.push_back({2, rows, 0, {0, rows.bytes()}});
  return all;
}

}  // namespace
}  // namespace purlin

int main() {
  using namespace purlin;
  int reductions = 0, run = 0, failed = 0;
  for (const char* op : kReduceOps)
    for (const char* dtype : kReduceDtypes) {
      if (find_fold(op, dtype).fold == nullptr) continue;
      ++reductions;
      for (const Case& each : cases(find_fold(op, dtype).item_bytes)) {
        int64_t wrong = 0;
        with_dtype(dtype, [&](auto type) {
          wrong = wrong_items<typename decltype(type)::Item>(op, dtype, each);
        });
        ++run;
        if (wrong == 0) continue;
        ++failed;
        std::printf("%s of %s over %d ranks, %ld bytes from %ld on, shift %ld: %ld items differ\n",
                    op, dtype, each.world, static_cast<long>(each.part.end),
                    static_cast<long>(each.part.begin), static_cast<long>(each.shift),
                    static_cast<long>(wrong));
      }
    }
  std::printf("%d reductions, %d cases, %d differ\n", reductions, run, failed);
  return failed == 0 ? 0 : 1;
}
