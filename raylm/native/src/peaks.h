// The largest logit of each row and its index.
#pragma once

#include <limits>
#include <vector>

#include "team.h"
#include "vector.h"

namespace raylm {

struct Peak {
  float value;  // NaN if the row has one
  int64_t at;   // the first of equals
};

inline Peak peak_of(const float* from, int64_t count) {
  constexpr int kApart = 4;
  f32x16 top[kApart];
  i32x16 nan = i32x16{};
  for (auto& lanes : top) lanes = splat(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kApart * kLanes <= count; i += kApart * kLanes)
    for (int j = 0; j < kApart; j++) {
      const f32x16 v = load<f32x16>(from + i + j * kLanes);
      nan |= v != v;
      top[j] = max(v, top[j]);
    }
  float value = highest(max(max(top[0], top[1]), max(top[2], top[3])));
  bool any_nan = any(nan);
  for (; i < count; i++) {
    any_nan |= from[i] != from[i];
    value = from[i] > value ? from[i] : value;
  }
  if (any_nan) return {std::numeric_limits<float>::quiet_NaN(), 0};
  int64_t at = 0;
  for (const f32x16 wanted = splat(value); at + kLanes <= count; at += kLanes) {
    if (any(load<f32x16>(from + at) == wanted)) break;
  }
  while (at + 1 < count && from[at] != value) at++;
  return {value, at};
}

// For `rows` rows of `columns` logits, `stride` apart.
inline void peaks(Team& team, const float* logits, int rows, int64_t columns, ptrdiff_t stride, float* values,
                  int64_t* at) {
  constexpr int64_t kPart = 16384;
  const int parts = int((columns + kPart - 1) / kPart);
  std::vector<Peak> found(size_t(rows) * parts);
  team.run([&](int) {
    team.each(rows * parts, [&](int piece) {
      const int64_t first = piece % parts * kPart;
      found[piece] = peak_of(logits + piece / parts * stride + first, std::min(kPart, columns - first));
    });
  });
  for (int row = 0; row < rows; row++) {
    Peak best = found[size_t(row) * parts];
    for (int part = 1; part < parts; part++) {
      const Peak& other = found[size_t(row) * parts + part];
      if (other.value > best.value || other.value != other.value) best = {other.value, part * kPart + other.at};
    }
    values[row] = best.value;
    at[row] = best.at;
  }
}

}  // namespace raylm
