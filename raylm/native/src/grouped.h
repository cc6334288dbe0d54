// Linear layers with a scale for each group of inputs: `weight = (q - zero) * scale`, where q has 4 or 8 bits, or
// `weight = q * scale + offset`.
//
// The weights are packed like the others, in streams of 16 columns. A 32-bit unit holds 4 neighbours of one column in 8 bits,
// or 8 neighbours in 4 bits: the first four in the lower halves of its bytes, the others in the upper halves. The inputs are
// rounded to 8 bits with one scale for each of their groups, as llama.cpp's Q8 blocks are. The products of a group are summed
// as integers, which is exact in any order, and multiplied by the scales once. The zero is subtracted as
// zero * (sum of the rounded inputs of the group), and an offset is added likewise.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "product.h"
#include "rounding.h"
#include "team.h"
#include "vector.h"

namespace raylm {

// What a group has besides its scale.
//   kMiddle: nothing. 4-bit weights are unsigned, and their zero is 8. Weights of 8 bits are signed.
//   kShared: a zero in the scale's word, for 4-bit weights.
//   kOffsets: an offset in a word of its own, so that a group has 16 scales and then 16 offsets, each float32.
enum Zeros : int32_t { kMiddle = 0, kShared = 1, kOffsets = 2 };

// A scale and its zero share a word. A zero of 4 bits has 8 further bits behind the point.
constexpr uint32_t kZeroMask = 0xfff;
constexpr float kZeroStep = 1.0f / 256;

// Rows of one tile, for two streams: their sums and totals are in registers, and with 4 bits also what zeros need.
#if defined(__AVX512F__)
template <int BITS>
constexpr int kGroupedRows = BITS == 4 ? 6 : 8;
#else
template <int BITS>
constexpr int kGroupedRows = 2;
#endif

// The nearest scale that has room for a zero below it: 12 significant bits.
RAYLM_INLINE float kept_scale(float scale) { return bits<float>((bits<uint32_t>(scale) + kZeroMask / 2 + 1) & ~kZeroMask); }

// sum + weights . x, of four unsigned weights of at most 15 and four signed inputs in the bytes of a unit.
RAYLM_INLINE i32x16 nibble_dot(i32x16 sum, u32x16 weights, uint32_t x) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)splat(x));
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)splat(x));
  return sum + (i32x16)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
  typedef Vector<int16_t, 2 * kLanes>::Type i16x32;
  // The sum of two products fits in 16 bits: at most 2 * 15 * 128.
  const uint32_t even = uint32_t(uint16_t(int8_t(x))) | uint32_t(int32_t(int8_t(x >> 16))) << 16;
  const uint32_t odd = uint32_t(uint16_t(int8_t(x >> 8))) | uint32_t(int32_t(int8_t(x >> 24))) << 16;
  const i16x32 pairs = bits<i16x32>(weights & 0x00ff00ffu) * bits<i16x32>(splat(even)) +
                       bits<i16x32>((weights >> 8) & 0x00ff00ffu) * bits<i16x32>(splat(odd));
  const i32x16 both = bits<i32x16>(pairs);
  return sum + ((both << 16) >> 16) + (both >> 16);
#endif
}

// sum + weights . x, of four unsigned weights of 8 bits and four signed inputs in the bytes of a unit.
RAYLM_INLINE i32x16 byte_dot(i32x16 sum, u32x16 weights, uint32_t x) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)splat(x));
#elif defined(__AVX512BW__)
  const __m512i even = _mm512_set1_epi32(int32_t(uint32_t(uint16_t(int8_t(x))) | uint32_t(int32_t(int8_t(x >> 16))) << 16));
  const __m512i odd = _mm512_set1_epi32(int32_t(uint32_t(uint16_t(int8_t(x >> 8))) | uint32_t(int32_t(int8_t(x >> 24))) << 16));
  const u32x16 first = weights & 0x00ff00ffu, second = (weights >> 8) & 0x00ff00ffu;
  return sum + (i32x16)_mm512_madd_epi16((__m512i)first, even) + (i32x16)_mm512_madd_epi16((__m512i)second, odd);
#else
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) sum += bits<i32x16>((weights >> (8 * i)) & 255u) * int32_t(int8_t(x >> (8 * i)));
  return sum;
#endif
}

// One stream of 16 columns, and the scales of its groups, [groups][16], or with offsets [groups][2][16].
struct GroupedStream {
  const uint32_t* words;
  const uint32_t* scales;  // float32; with kShared the upper 20 bits of a float32 above a zero in 256ths of a step
};

template <Zeros ZEROS>
constexpr int kWordsAGroup = ZEROS == kOffsets ? 2 : 1;

// R rows of rounded inputs times two streams, while AHEAD streams, `next`, are prefetched. `out` has the totals over
// all groups.
template <int BITS, Zeros ZEROS, int R, int AHEAD>
__attribute__((noinline)) void grouped_tile(const GroupedStream (&streams)[2], const uint32_t* x, const RoundedGroup* rounded,
                                            int depth, int group, const char* const* next, f32x16* out) {
  const ptrdiff_t stride = depth / 4;
  const int groups = depth / group, group_units = group * BITS / 32;
  f32x16 totals[R][2] = {};
  ptrdiff_t unit = 0;
  for (int g = 0; g < groups; g++) {
    // With 8 bits the sums begin at -128 * sum. With 4 bits, subtracting the zero from the floats is faster.
    i32x16 sums[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = splat(BITS == 8 ? -(rounded[r * groups + g].sum << 7) : 0);
    for (int u = 0; u < group_units; u++, unit++) {
      const u32x16 words[2] = {load<u32x16>(streams[0].words + unit * kLanes), load<u32x16>(streams[1].words + unit * kLanes)};
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) __builtin_prefetch(streams[v].words + (unit + kOwnAhead) * kLanes, 0, 3);
      if constexpr (BITS == 4) {
        const u32x16 low[2] = {words[0] & 0x0f0f0f0fu, words[1] & 0x0f0f0f0fu};
        const u32x16 high[2] = {(words[0] >> 4) & 0x0f0f0f0fu, (words[1] >> 4) & 0x0f0f0f0fu};
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const uint32_t* inputs = x + r * stride + 2 * unit;
#pragma GCC unroll 2
          for (int v = 0; v < 2; v++)
            sums[r][v] = nibble_dot(nibble_dot(sums[r][v], low[v], inputs[0]), high[v], inputs[1]);
        }
      } else {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
          for (int v = 0; v < 2; v++) sums[r][v] = byte_dot(sums[r][v], words[v], x[r * stride + unit]);
        }
      }
#pragma GCC unroll 4
      for (int a = 0; a < AHEAD; a++) __builtin_prefetch(next[a] + unit * 64, 0, 2);
    }
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const uint32_t* scales = streams[v].scales + g * kLanes * kWordsAGroup<ZEROS>;
      const u32x16 word = load<u32x16>(scales);
      const f32x16 scale = bits<f32x16>(ZEROS == kShared ? word & ~kZeroMask : word);
      const f32x16 zero = ZEROS == kShared ? convert<f32x16>(bits<i32x16>(word & kZeroMask)) * kZeroStep
                                           : splat(8.0f);
      f32x16 offset = {};
      if constexpr (ZEROS == kOffsets) offset = bits<f32x16>(load<u32x16>(scales + kLanes));
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const RoundedGroup inputs = rounded[r * groups + g];
        f32x16 total = convert<f32x16>(sums[r][v]);
        if constexpr (BITS == 4 && ZEROS != kOffsets) total -= zero * float(inputs.sum);
        totals[r][v] += total * (scale * inputs.scale);
        if constexpr (ZEROS == kOffsets) totals[r][v] += offset * (float(inputs.sum) * inputs.scale);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    store(out + 2 * r, totals[r][0]);
    store(out + 2 * r + 1, totals[r][1]);
  }
}

template <int BITS, Zeros ZEROS, int AHEAD, int... R>
constexpr auto grouped_tiles_of(std::integer_sequence<int, R...>) {
  return std::array{&grouped_tile<BITS, ZEROS, R + 1, AHEAD>...};
}

// A product as one phase. All threads of the team call it. `x` is [rows][depth] bytes, `rounded` [rows][groups].
template <int BITS, Zeros ZEROS, Into INTO, class Out>
void grouped_product(Team& team, const Linear& w, const uint8_t* x, const RoundedGroup* rounded, int rows,
                     Target<Out> target) {
  constexpr auto rows_of = std::make_integer_sequence<int, kGroupedRows<BITS>>();
  constexpr std::array tiles_by_rows{grouped_tiles_of<BITS, ZEROS, 0>(rows_of), grouped_tiles_of<BITS, ZEROS, 2>(rows_of)};
  const bool gated = INTO == Into::kGate;
  const int streams = w.columns / kLanes, groups = w.depth / w.group;
  const int pairs = gated ? streams / 2 : (streams + 1) / 2;
  const int tiles = (rows + kGroupedRows<BITS> - 1) / kGroupedRows<BITS>;
  const auto stream = [&](int at) {
    const ptrdiff_t grouped = ptrdiff_t(at) * groups * kLanes * kWordsAGroup<ZEROS>;
    return GroupedStream{w.packed + ptrdiff_t(at) * w.units * kLanes, reinterpret_cast<const uint32_t*>(w.scales) + grouped};
  };
  const auto first_of = [&](int pair) { return gated ? pair : 2 * pair; };
  const auto second_of = [&](int pair) { return gated ? pair + pairs : std::min(2 * pair + 1, streams - 1); };
  team.share(pairs, [&](int pair, int next_pair) {
    const int first = first_of(pair), second = second_of(pair);
    const GroupedStream pieces[2] = {stream(first), stream(second)};
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
      f32x16 sums[kGroupedRows<BITS>][2];
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
