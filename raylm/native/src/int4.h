// Linear layers whose weights have 4 bits: `weight = (q - zero) * scale`, one scale and zero for each group of inputs.
//
// Packed like the others, in streams of 16 columns; a 32-bit unit holds 8 neighbours of one column. Those with even
// places fill its lower half and those with odd places its upper half, so that one shift brings k and k + 1 to the low
// ends of both halves, where a table turns them into the pair that the dot product of bfloat16 takes. A group's product
// with q - 8 is scaled once; what zeros other than 8 add is the sum of the group's inputs times `offsets`.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "product.h"
#include "team.h"
#include "vector.h"

namespace raylm {

// The weights of a unit, less 8, in the steps in which they are multiplied.
template <class T>
struct Nibbles;

RAYLM_INLINE f32x16 low_nibble(u32x16 word) { return __builtin_convertvector(bits<i32x16>(word & 15u) - 8, f32x16); }

template <>
struct Nibbles<bf16> {
  static constexpr int kSteps = 4;
  static RAYLM_INLINE u32x16 step(u32x16 word, int j) {
#if defined(__AVX512BW__)
    // An index has 5 bits, of which the last is the next weight's: the table has every number twice.
    alignas(64) static constexpr uint16_t kNumbers[32] = {
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
        0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
        0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    return (u32x16)_mm512_permutexvar_epi16((__m512i)(word >> (4 * j)), load<__m512i>(kNumbers));
#else
    const u32x16 even = bits<u32x16>(low_nibble(word >> (4 * j))), odd = bits<u32x16>(low_nibble(word >> (4 * j + 16)));
    return (even >> 16) | odd;  // small integers: their lower halves are 0
#endif
  }
};

template <>
struct Nibbles<float> {
  static constexpr int kSteps = 8;
  static RAYLM_INLINE f32x16 step(u32x16 word, int j) {
    const u32x16 shifted = word >> (4 * (j / 2) + 16 * (j % 2));
#if defined(__AVX512F__)
    alignas(64) static constexpr float kNumbers[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return (f32x16)_mm512_permutexvar_ps((__m512i)shifted, load<__m512>(kNumbers));
#else
    return low_nibble(shifted);
#endif
  }
};

#if defined(__AVX512F__)
constexpr int kInt4Rows = 6;  // 6 rows by 2 streams by 2 sums: 24 of 32 registers
constexpr int kInt4Sets = 2;
#else
constexpr int kInt4Rows = 2;
constexpr int kInt4Sets = 1;
#endif

// One stream of 16 columns, and the scales and offsets of its groups, [groups][16].
struct Int4Stream {
  const uint32_t* words;
  const float* scales;
  const float* offsets;  // or null
};

// R rows against two streams. A group has several sums, for one would wait for itself where there are few rows, and as
// many whatever R is, so that a row's numbers do not depend on those beside it. `out` holds the totals of all groups.
template <class T, int R>
__attribute__((noinline)) void int4_tile(const Int4Stream (&streams)[2], const typename Lane<T>::Unit* x,
                                         const float* x_sums, int depth, int group, const char* next, f32x16* out) {
  constexpr int steps = Nibbles<T>::kSteps;
  constexpr int sets = kInt4Sets;
  const ptrdiff_t stride = depth / Lane<T>::kPack;
  const int groups = depth / group, group_units = group / 8;
  std::fill_n(out, 2 * R, f32x16{});
  ptrdiff_t unit = 0;
  for (int g = 0; g < groups; g++) {
    f32x16 sums[sets][R][2] = {};
    for (int u = 0; u < group_units; u++, unit++) {
      const u32x16 words[2] = {load<u32x16>(streams[0].words + unit * kLanes), load<u32x16>(streams[1].words + unit * kLanes)};
#pragma GCC unroll 8
      for (int j = 0; j < steps; j++) {
        const auto first = Nibbles<T>::step(words[0], j), second = Nibbles<T>::step(words[1], j);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const auto value = x[r * stride + unit * steps + j];
          auto& sum = sums[j % sets][r];
          sum[0] = Lane<T>::dot(sum[0], first, value);
          sum[1] = Lane<T>::dot(sum[1], second, value);
        }
      }
      if (next) __builtin_prefetch(next + unit * 64, 0, 2);
    }
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const f32x16 scale = load<f32x16>(streams[v].scales + g * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        f32x16 sum = sums[0][r][v];
#pragma GCC unroll 4
        for (int s = 1; s < sets; s++) sum += sums[s][r][v];
        out[2 * r + v] += sum * scale;
      }
      if (!streams[v].offsets) continue;
      const f32x16 offset = load<f32x16>(streams[v].offsets + g * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) out[2 * r + v] += offset * x_sums[r * groups + g];
    }
  }
}

template <class T, int... R>
constexpr auto int4_tiles_of(std::integer_sequence<int, R...>) {
  return std::array{&int4_tile<T, R + 1>...};
}

// The inputs of a row summed group by group.
template <class T>
void sum_groups(const T* x, int depth, int group, float* out) {
  for (int begin = 0; begin < depth; begin += group, out++) {
    const int end = begin + group;
    f32x16 wide = {};
    int i = begin;
    for (; i + kLanes <= end; i += kLanes) wide += load_wide(x + i);
    float total = sum(wide);
    for (; i < end; i++) total += widen(x[i]);
    *out = total;
  }
}

// A product as one phase; all threads of the team call it.
// `x` is [rows][depth], `x_sums` [rows][groups] where there are offsets.
template <Into INTO, class T, class Out>
void int4_product(Team& team, const Linear& w, const T* x, const float* x_sums, int rows, Target<Out> target) {
  constexpr auto tiles_by_rows = int4_tiles_of<T>(std::make_integer_sequence<int, kInt4Rows>());
  const bool gated = INTO == Into::kGate;
  const int streams = w.columns / kLanes, groups = w.depth / w.group;
  const int pairs = gated ? streams / 2 : (streams + 1) / 2;
  const int tiles = (rows + kInt4Rows - 1) / kInt4Rows;
  const auto stream = [&](int at) {
    const ptrdiff_t grouped = ptrdiff_t(at) * groups * kLanes;
    return Int4Stream{w.packed + ptrdiff_t(at) * w.units * kLanes, w.scales + grouped, w.offsets ? w.offsets + grouped : nullptr};
  };
  const auto first_of = [&](int pair) { return gated ? pair : 2 * pair; };
  const auto second_of = [&](int pair) { return gated ? pair + pairs : std::min(2 * pair + 1, streams - 1); };
  team.share(pairs, [&](int pair, int next_pair) {
    const int first = first_of(pair), second = second_of(pair);
    const Int4Stream pieces[2] = {stream(first), stream(second)};
    const ptrdiff_t apart = second > first ? kLanes : 0;
    for (int t = 0; t < tiles; t++) {
      const int begin = int(ptrdiff_t(rows) * t / tiles), end = int(ptrdiff_t(rows) * (t + 1) / tiles);
      // The first tile reads the weights itself; the two that follow have time to ask for the next pair's.
      const char* next = nullptr;
      if (next_pair < pairs && (t == 1 || t == 2))
        next = reinterpret_cast<const char*>(stream(t == 1 ? first_of(next_pair) : second_of(next_pair)).words);
      f32x16 sums[kInt4Rows][2];
      tiles_by_rows[end - begin - 1](
          pieces, reinterpret_cast<const typename Lane<T>::Unit*>(x + ptrdiff_t(begin) * w.depth),
          w.offsets ? x_sums + ptrdiff_t(begin) * groups : nullptr, w.depth, w.group, next, sums[0]);
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
