// Linear layers with packed weights: `out = x . weight^T + bias`, for any number of rows.
//
// Packed form: groups of 16 columns (rows of the checkpoint's weight). Each group is one stream of 32-bit units
// [units][16], so that a vector register holds 16 columns of one unit and no horizontal sum is needed. A piece of work
// is the streams of two groups times all rows: one core reads the weights from memory once, in order.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "grouped.h"
#include "product.h"
#include "team.h"
#include "vector.h"

namespace raylm {

// One tile: R rows times two groups, with sums [R][2] in `out`, while AHEAD groups, `next`, are prefetched. Separate
// functions, so that the uses of the sums do not multiply the number of functions.
template <class T, int R, int AHEAD>
__attribute__((noinline)) void tile(const uint32_t* const (&streams)[2], const typename Lane<T>::Unit* x, int units,
                                    const char* const* next, typename Lane<T>::Sum* out) {
  typename Lane<T>::Sum sums[R][2] = {};
  multiply<T, R, 2, kOwnAhead, AHEAD>(sums, x, units, streams, kLanes, units, next);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    store(out + 2 * r, sums[r][0]);
    store(out + 2 * r + 1, sums[r][1]);
  }
}

template <class T, int AHEAD, int... R>
constexpr auto tiles_of(std::integer_sequence<int, R...>) {
  return std::array{&tile<T, R + 1, AHEAD>...};
}

// The sum of one group as floats: exact for float types, scaled for int8.
template <class T>
struct Finished {
  static RAYLM_INLINE f32x16 of(const Linear& w, int column, float, f32x16 sum) {
    return w.bias ? sum + load<f32x16>(w.bias + column) : sum;
  }
};

template <>
struct Finished<int8_t> {
  static RAYLM_INLINE f32x16 of(const Linear& w, int column, float scale, i32x16 sum) {
    const i32x16 exact = sum - load<i32x16>(w.sums + column);
    const f32x16 value = convert<f32x16>(exact) * (load<f32x16>(w.scales + column) * scale);
    return w.bias ? value + load<f32x16>(w.bias + column) : value;
  }
};

// A product as one phase. All threads of the team call it. `x` is [rows][w.units] units. A piece is a pair of column
// groups. A thread prefetches its next pair while it computes.
template <class T, Into INTO, class Out>
void product(Team& team, const Linear& w, const typename Lane<T>::Unit* x, const RoundedGroup* rounded, int rows,
             Target<Out> target) {
  const int groups = w.columns / kLanes;
  const bool gated = INTO == Into::kGate;
  const int pairs = gated ? groups / 2 : (groups + 1) / 2;
  const ptrdiff_t size = ptrdiff_t(w.units) * kLanes;
  const int tiles = (rows + kRows - 1) / kRows;
  constexpr auto rows_of = std::make_integer_sequence<int, kRows>();
  constexpr std::array tiles_by_rows{tiles_of<T, 0>(rows_of), tiles_of<T, 2>(rows_of)};
  team.share(pairs, [&](int pair, int next_pair) {
    const int first = gated ? pair : 2 * pair;
    const int second = gated ? pair + pairs : std::min(2 * pair + 1, groups - 1);
    const uint32_t* const streams[2] = {w.packed + first * size, w.packed + second * size};
    const ptrdiff_t apart = second > first ? kLanes : 0;
    const char* next[2] = {};
    if (next_pair < pairs) {
      next[0] = reinterpret_cast<const char*>(w.packed + (gated ? next_pair : 2 * next_pair) * size);
      next[1] = reinterpret_cast<const char*>(
          w.packed + (gated ? next_pair + pairs : std::min(2 * next_pair + 1, groups - 1)) * size);
    }
    for (int t = 0; t < tiles; t++) {
      const int begin = int(ptrdiff_t(rows) * t / tiles), end = int(ptrdiff_t(rows) * (t + 1) / tiles);
      typename Lane<T>::Sum sums[kRows][2];
      // The first tile reads the weights; the second has time to prefetch the next pair.
      const bool asks = t == 1 && next[0];
      tiles_by_rows[asks][end - begin - 1](streams, x + ptrdiff_t(begin) * w.units, w.units, next, sums[0]);
      for (int row = begin; row < end; row++) {
        const float scale = rounded ? rounded[row].scale : 1.0f;
        const auto& sum = sums[row - begin];
        put<INTO>(target, row * target.stride + first * kLanes, Finished<T>::of(w, first * kLanes, scale, sum[0]),
                  Finished<T>::of(w, second * kLanes, scale, sum[1]), apart);
      }
    }
  });
}

// `out = x . weight^T + bias` by the whole team, in its own phases. Every thread calls it. `x` is [rows][w.depth].
template <Into INTO, class T, class Out>
void linear(Team& team, const Linear& w, const T* x, int rows, Quantized scratch, Target<Out> target) {
  if (w.kind == kInt8 && !w.group) {
    team.each(rows, [&](int row) {
      const ptrdiff_t at = ptrdiff_t(row) * w.depth;
      scratch.groups[row] = round_inputs<128>(x + at, w.depth, scratch.values + at);
    });
    product<int8_t, INTO, Out>(team, w, reinterpret_cast<const uint32_t*>(scratch.values), scratch.groups, rows, target);
  } else if (w.kind == kInt8 || w.kind == kInt4) {
    const int groups = w.depth / w.group;
    team.each(rows * groups, [&](int piece) {
      const ptrdiff_t at = ptrdiff_t(piece) * w.group;
      scratch.groups[piece] = round_inputs<0>(x + at, w.group, scratch.values + at);
    });
    const bool offsets = w.zeros == kOffsets;
    const auto multiply = w.kind == kInt8 ? (offsets ? grouped_product<8, kOffsets, INTO, Out> : grouped_product<8, kMiddle, INTO, Out>)
                          : offsets              ? grouped_product<4, kOffsets, INTO, Out>
                          : w.zeros == kShared   ? grouped_product<4, kShared, INTO, Out>
                                                 : grouped_product<4, kMiddle, INTO, Out>;
    multiply(team, w, scratch.values, scratch.groups, rows, target);
  } else {
    typedef typename Lane<T>::Unit Unit;
    product<T, INTO, Out>(team, w, reinterpret_cast<const Unit*>(x), nullptr, rows, target);
  }
}

// Packs [columns][units] words to [ceil(columns / 16)][units][16]. Padding columns are 0.
inline void pack(Team& team, const uint32_t* from, int columns, int units, uint32_t* to) {
  team.each((columns + kLanes - 1) / kLanes, [&](int group) {
    for (int lane = 0; lane < kLanes; lane++) {
      const int column = group * kLanes + lane;
      uint32_t* out = to + ptrdiff_t(group) * units * kLanes + lane;
      for (int u = 0; u < units; u++) out[ptrdiff_t(u) * kLanes] = column < columns ? from[ptrdiff_t(column) * units + u] : 0;
    }
  });
}

}  // namespace raylm
