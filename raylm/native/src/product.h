// A linear layer as the kernels use it, and the output of its product.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vector.h"

namespace raylm {

enum Kind : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3 };

// Shared with Python (library.py): keep the order. `columns` is a multiple of 16, `units` is the number of 32-bit words
// in a row.
struct Linear {
  int32_t kind;
  int32_t columns;
  int32_t depth;  // number of values summed
  int32_t units;
  const uint32_t* packed;  // [columns / 16][units][16]
  const float* bias;       // [columns], or null
  const float* scales;     // [columns / 16][depth / group][16], or with no group [columns]
  const int32_t* sums;     // int8 without groups: [columns], 128 * sum of the column's weights
  int32_t group;           // inputs that share a scale, a multiple of 8, or 0 for all (int8 alone)
  int32_t zeros;           // with groups: a Zeros (grouped.h)
};

// Rows of one tile, for two groups of columns.
#if defined(__AVX512F__)
constexpr int kRows = 12;  // 12 rows by 2 groups: 24 of 32 registers hold sums
#else
constexpr int kRows = 3;  // 3 rows by 2 groups of 2 registers: 12 of 16
#endif

// The number of units that a tile prefetches its own weights ahead. The processor's own prefetching falls behind as soon as
// a tile has a few rows.
constexpr int kOwnAhead = 64;

// The output of a product.
enum class Into { kStore, kAdd, kGate };

struct Silu {
  static RAYLM_INLINE f32x16 of(f32x16 x) { return x / (1.0f + exp(-max(x, splat(-80.0f)))); }
};

// The destination: `out` [rows][stride] of type Out. With kGate the first half of the columns gates the second. With
// kAdd the result is added to `before`, which may be `out`.
template <class Out>
struct Target {
  Out* out;
  ptrdiff_t stride;
  const Out* before = nullptr;
};

template <Into INTO, class Out>
RAYLM_INLINE void put(const Target<Out>& target, ptrdiff_t offset, f32x16 first, f32x16 second, ptrdiff_t apart) {
  Out* at = target.out + offset;
  if constexpr (INTO == Into::kGate) {
    store_narrow(at, Silu::of(first) * second);
  } else if constexpr (INTO == Into::kAdd) {
    const Out* from = target.before + offset;
    store_narrow(at, load_wide(from) + first);
    if (apart) store_narrow(at + apart, load_wide(from + apart) + second);
  } else {
    store_narrow(at, first);
    if (apart) store_narrow(at + apart, second);
  }
}

}  // namespace raylm
