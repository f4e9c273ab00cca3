// What the Python modules of all platforms share.
#pragma once

#include <nanobind/nanobind.h>

#include "domain/counters.h"
#include "layout/dtypes.h"
#include "xla/target.h"

namespace purlin::xla_ffi {

// A custom-call target as jax.ffi.register_ffi_target and register_ffi_type take it.
inline nanobind::dict as_dict(const Target& target) {
  namespace nb = nanobind;
  nb::dict stages, type, result;
  stages["instantiate"] = nb::capsule(target.instantiate);
  stages["execute"] = nb::capsule(target.execute);
  type["type_id"] = nb::capsule(target.type_id);
  type["type_info"] = nb::capsule(target.type_info);
  result["stages"] = stages;
  result["type"] = type;
  return result;
}

// ((reduction, dtype), ...) for which knows(reduction, dtype).
template <class Knows>
nanobind::tuple reduces(Knows knows) {
  namespace nb = nanobind;
  nb::list all;
  for (const char* op : kReduceOps)
    for (const char* dtype : kReduceDtypes)
      if (knows(op, dtype)) all.append(nb::make_tuple(op, dtype));
  return nb::tuple(all);
}

// {regime: (names of the collectives that it fits, those of them that may run in place)}.
inline nanobind::dict regimes() {
  namespace nb = nanobind;
  nb::dict all;
  for (int i = 0; i < kNumRegimes; ++i) {
    const auto regime = static_cast<Regime>(i);
    nb::list fitting, inplace;
    for (const Collective& row : kCollectives) {
      if (fits(regime, row)) fitting.append(row.name.data());
      if (fits(regime, row) && in_place(regime, row)) inplace.append(row.name.data());
    }
    all[kRegimeNames[i]] = nb::make_tuple(fitting, inplace);
  }
  return all;
}

// {regime: what takes its place where ranks cannot reach each other's arrays}.
inline nanobind::dict without_lending() {
  nanobind::dict all;
  for (int i = 0; i < kNumRegimes; ++i)
    if (const auto regime = static_cast<Regime>(i); is_lent(regime))
      all[kRegimeNames[i]] = kRegimeNames[static_cast<int>(purlin::without_lending(regime))];
  return all;
}

// {(op, regime): count} of the counters that are not zero; count(row, regime).
template <class Count>
nanobind::dict counts(Count count) {
  namespace nb = nanobind;
  nb::dict all;
  for (int row = 0; row < kNumCollectives; ++row)
    for (int regime = 0; regime < kNumRegimes; ++regime)
      if (const int64_t n = count(row, regime); n > 0)
        all[nb::make_tuple(kCollectives[row].name.data(), kRegimeNames[regime])] = n;
  return all;
}

}  // namespace purlin::xla_ffi
