// Linear layers with 4-bit weights: `weight = (q - zero) * scale`, with one scale and zero for each group of inputs.
//
// Weights are packed in streams of 16 columns, like other types. A 32-bit unit has 8 neighbours of one column, the
// first four in the lower halves of its bytes and the others in the upper halves. Inputs are rounded to 8 bits with one
// scale for each group, like llama.cpp's Q8 blocks. So the products of a group are summed as integers, which is exact
// in any order, and scaled once. A zero is subtracted as a multiple of the sum of the group's rounded inputs.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "product.h"
#include "rounding.h"
#include "team.h"
#include "vector.h"

namespace raylm {

// sum + weights . x, of four unsigned weights of at most 15 and four signed inputs in the bytes of a unit.
RAYLM_INLINE i32x16 nibble_dot(i32x16 sum, u32x16 weights, uint32_t x) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)splat(x));
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)splat(x));
  return sum + (i32x16)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
  typedef int16_t i16x32 __attribute__((vector_size(64)));
  // The sum of two products fits in 16 bits: at most 2 * 15 * 128.
  const uint32_t even = uint32_t(uint16_t(int8_t(x))) | uint32_t(int32_t(int8_t(x >> 16))) << 16;
  const uint32_t odd = uint32_t(uint16_t(int8_t(x >> 8))) | uint32_t(int32_t(int8_t(x >> 24))) << 16;
  const i16x32 pairs = bits<i16x32>(weights & 0x00ff00ffu) * bits<i16x32>(splat(even)) +
                       bits<i16x32>((weights >> 8) & 0x00ff00ffu) * bits<i16x32>(splat(odd));
  const i32x16 both = bits<i32x16>(pairs);
  return sum + ((both << 16) >> 16) + (both >> 16);
#endif
}

// One stream of 16 columns, and the scales and zeros of its groups, [groups][16].
struct Int4Stream {
  const uint32_t* words;
  const float* scales;
  const int32_t* zeros;  // or null if all are 8
};

// R rows of rounded inputs times two streams, while AHEAD streams, `next`, are prefetched. `out` has the totals over
// all groups.
template <int R, int AHEAD>
__attribute__((noinline)) void int4_tile(const Int4Stream (&streams)[2], const uint32_t* x, const RoundedGroup* rounded,
                                         int depth, int group, const char* const* next, f32x16* out) {
  const ptrdiff_t stride = depth / 4;
  const int groups = depth / group, group_units = group / 8;
  std::fill_n(out, 2 * R, f32x16{});
  ptrdiff_t unit = 0;
  for (int g = 0; g < groups; g++) {
    i32x16 sums[R][2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const i32x16 zero = streams[v].zeros ? load<i32x16>(streams[v].zeros + g * kLanes) : splat(8);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) sums[r][v] = zero * -rounded[r * groups + g].sum;
    }
    for (int u = 0; u < group_units; u++, unit++) {
      const u32x16 words[2] = {load<u32x16>(streams[0].words + unit * kLanes), load<u32x16>(streams[1].words + unit * kLanes)};
      const u32x16 low[2] = {words[0] & 0x0f0f0f0fu, words[1] & 0x0f0f0f0fu};
      const u32x16 high[2] = {(words[0] >> 4) & 0x0f0f0f0fu, (words[1] >> 4) & 0x0f0f0f0fu};
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const uint32_t* inputs = x + r * stride + 2 * unit;
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) sums[r][v] = nibble_dot(nibble_dot(sums[r][v], low[v], inputs[0]), high[v], inputs[1]);
      }
#pragma GCC unroll 4
      for (int a = 0; a < AHEAD; a++) __builtin_prefetch(next[a] + unit * 64, 0, 2);
    }
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const f32x16 scale = load<f32x16>(streams[v].scales + g * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
        out[2 * r + v] += __builtin_convertvector(sums[r][v], f32x16) * (scale * rounded[r * groups + g].scale);
    }
  }
}

template <int AHEAD, int... R>
constexpr auto int4_tiles_of(std::integer_sequence<int, R...>) {
  return std::array{&int4_tile<R + 1, AHEAD>...};
}

// A product as one phase. All threads of the team call it. `x` is [rows][depth] bytes, `rounded` [rows][groups].
template <Into INTO, class Out>
void int4_product(Team& team, const Linear& w, const uint8_t* x, const RoundedGroup* rounded, int rows, Target<Out> target) {
  constexpr auto rows_of = std::make_integer_sequence<int, kRows>();
  constexpr std::array tiles_by_rows{int4_tiles_of<0>(rows_of), int4_tiles_of<2>(rows_of)};
  const bool gated = INTO == Into::kGate;
  const int streams = w.columns / kLanes, groups = w.depth / w.group;
  const int pairs = gated ? streams / 2 : (streams + 1) / 2;
  const int tiles = (rows + kRows - 1) / kRows;
  const auto stream = [&](int at) {
    const ptrdiff_t grouped = ptrdiff_t(at) * groups * kLanes;
    return Int4Stream{w.packed + ptrdiff_t(at) * w.units * kLanes, w.scales + grouped, w.zeros ? w.zeros + grouped : nullptr};
  };
  const auto first_of = [&](int pair) { return gated ? pair : 2 * pair; };
  const auto second_of = [&](int pair) { return gated ? pair + pairs : std::min(2 * pair + 1, streams - 1); };
  team.share(pairs, [&](int pair, int next_pair) {
    const int first = first_of(pair), second = second_of(pair);
    const Int4Stream pieces[2] = {stream(first), stream(second)};
    const ptrdiff_t apart = second > first ? kLanes : 0;
    const char* next[2] = {};
    if (next_pair < pairs) {
      next[0] = reinterpret_cast<const char*>(stream(first_of(next_pair)).words);
      next[1] = reinterpret_cast<const char*>(stream(second_of(next_pair)).words);
    }
    for (int t = 0; t < tiles; t++) {
      const int begin = int(ptrdiff_t(rows) * t / tiles), end = int(ptrdiff_t(rows) * (t + 1) / tiles);
      // The first tile reads the weights; the second has time to prefetch the next pair.
      const bool asks = t == 1 && next[0];
      f32x16 sums[kRows][2];
      tiles_by_rows[asks][end - begin - 1](pieces, reinterpret_cast<const uint32_t*>(x + ptrdiff_t(begin) * w.depth),
                                           rounded + ptrdiff_t(begin) * groups, w.depth, w.group, next, sums[0]);
      for (int row = begin; row < end; row++) {
        f32x16 one = sums[row - begin][0], two = sums[row - begin][1];
        if (w.bias) {
          one += load<f32x16>(w.bias + first * kLanes);
          two += load<f32x16>(w.bias + second * kLanes);
        }
        put<INTO>(target, row * target.stride + first * kLanes, one, two, apart);
      }
    }
  });
}

}  // namespace raylm
