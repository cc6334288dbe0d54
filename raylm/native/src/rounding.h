// Rounds the inputs of a product to 8 bits: symmetric, with each row's own step, so that no row changes another row's
// result.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vector.h"

namespace raylm {

// A group of rounded inputs of a row: the length of a step, and the sum of all inputs in steps.
struct RoundedGroup {
  float scale;
  int32_t sum;
};

// The rounded rows of x. Weights without groups: in steps of the whole row, with 128 added; others: in steps of each group.
struct Quantized {
  uint8_t* values;       // [rows][depth]
  RoundedGroup* groups;  // [rows][depth / group], or with no group [rows]
};

// Memory for several of them, each for rows of any depth up to the reserved one.
struct QuantizedSpace {
  void reserve(size_t rows, size_t depth) {
    values.resize(rows * depth);
    groups.resize(rows * most_groups(depth));
  }
  // Number `at` of those that have `rows` rows of depth `depth`.
  Quantized number(size_t at, size_t rows, size_t depth) {
    return {values.data() + at * rows * depth, groups.data() + at * rows * most_groups(depth)};
  }
  static size_t most_groups(size_t depth) { return (depth + 7) / 8; }
  std::vector<uint8_t> values;
  std::vector<RoundedGroup> groups;
};

// `count` inputs in 127 steps to each side of 0, each with `MIDDLE` added.
template <int MIDDLE, class T>
RoundedGroup round_inputs(const T* x, int count, uint8_t* out) {
  f32x16 most = {};
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const f32x16 v = load_wide(x + i);
    most = max(most, max(v, -v));
  }
  float top = highest(most);
  for (; i < count; i++) top = std::max(top, std::fabs(widen(x[i])));
  const float inverse = top > 0 ? 127.0f / top : 0.0f;
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  i32x16 sums = {};
  for (i = 0; i + kLanes <= count; i += kLanes) {
    // Values that are not finite also keep their low 8 bits, so that no sum overflows.
    const i32x16 steps = bits<i32x16>(load_wide(x + i) * inverse + magic) - bits<int32_t>(12582912.0f);
    const i32x16 value = (steps << 24) >> 24;
    sums += value;
    store_narrowed(out + i, value + MIDDLE);
  }
  int32_t total = sum(sums);
  for (; i < count; i++) {
    const float steps = widen(x[i]) * inverse;
    const int value = std::isfinite(steps) ? int(std::nearbyint(steps)) : 0;
    total += value;
    out[i] = uint8_t(value + MIDDLE);
  }
  return {top / 127.0f, total};
}

}  // namespace raylm
