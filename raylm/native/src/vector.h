// Sixteen lanes of 32 bits, and the operation that differs between instruction sets: the dot product of packed pairs.
//
// GCC and Clang compile these vectors for each target: one AVX-512 register, two of AVX2, four of SSE or NEON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define RAYLM_INLINE inline __attribute__((always_inline))

namespace raylm {

constexpr int kLanes = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

template <class V>
RAYLM_INLINE V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
RAYLM_INLINE void store(void* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

RAYLM_INLINE f32x16 splat(float x) { return f32x16{} + x; }
RAYLM_INLINE u32x16 splat(uint32_t x) { return u32x16{} + x; }
RAYLM_INLINE i32x16 splat(int32_t x) { return i32x16{} + x; }

template <class To, class From>
RAYLM_INLINE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

RAYLM_INLINE f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

RAYLM_INLINE float sum(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#endif
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
}

RAYLM_INLINE float highest(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#endif
  float top = v[0];
  for (int i = 1; i < kLanes; i++) top = v[i] > top ? v[i] : top;
  return top;
}

// exp(x) for x <= 88, with a relative error under 1e-7, and almost 0 for all x below -87: 2^n times a polynomial on
// [-ln2/2, ln2/2], as in Cephes.
RAYLM_INLINE f32x16 exp(f32x16 x) {
  x = max(x, splat(-87.0f));
#if defined(__AVX512F__)
  const f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), 8);
#else
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 shifted = x * 1.44269504088896341f + magic;
  const f32x16 n = shifted - magic;
#endif
  f32x16 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return p * bits<f32x16>((bits<i32x16>(shifted) - bits<i32x16>(magic) + 127) << 23);
#endif
}

// bfloat16 as stored. Arithmetic is in float.
struct bf16 {
  uint16_t raw;
};

RAYLM_INLINE float widen(bf16 x) { return bits<float>(uint32_t(x.raw) << 16); }
RAYLM_INLINE float widen(float x) { return x; }

// Rounds to nearest, ties to even. NaN stays NaN.
template <class T>
RAYLM_INLINE T narrow(float x);
template <>
RAYLM_INLINE float narrow<float>(float x) {
  return x;
}
template <>
RAYLM_INLINE bf16 narrow<bf16>(float x) {
  const uint32_t raw = bits<uint32_t>(x);
  if ((raw & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t((raw >> 16) | 0x40)};
  return bf16{uint16_t((raw + 0x7fffu + ((raw >> 16) & 1)) >> 16)};
}

RAYLM_INLINE u32x16 rounded(f32x16 x) {  // bfloat16 in the upper halves
  const u32x16 raw = bits<u32x16>(x);
  const u32x16 up = raw + 0x7fffu + ((raw >> 16) & 1);
  const u32x16 nan = (raw & 0x7fffffffu) > 0x7f800000u;
  return (nan & (raw | 0x400000u)) | (~nan & up);
}

RAYLM_INLINE f32x16 load_wide(const float* from) { return load<f32x16>(from); }
RAYLM_INLINE f32x16 load_wide(const bf16* from) {
  typedef uint16_t u16x16 __attribute__((vector_size(32)));
  return bits<f32x16>(__builtin_convertvector(load<u16x16>(from), u32x16) << 16);
}
RAYLM_INLINE void store_narrow(float* to, f32x16 v) { store(to, v); }
RAYLM_INLINE void store_narrow(bf16* to, f32x16 v) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
  const __m256bh packed = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(to, &packed, 32);
#else
  typedef uint16_t u16x16 __attribute__((vector_size(32)));
  store(to, __builtin_convertvector(rounded(v) >> 16, u16x16));
#endif
}

// The multiplication of a type: `kPack` neighbours along the summed dimension form one 32-bit unit.
template <class T>
struct Lane;

template <>
struct Lane<float> {
  static constexpr int kPack = 1;
  typedef float Unit;
  typedef f32x16 Vec;
  typedef f32x16 Sum;
  static RAYLM_INLINE Sum dot(Sum sum, Vec w, Unit x) { return sum + w * x; }
};

template <>
struct Lane<bf16> {
  static constexpr int kPack = 2;
  typedef uint32_t Unit;
  typedef u32x16 Vec;
  typedef f32x16 Sum;
  static RAYLM_INLINE Sum dot(Sum sum, Vec w, Unit x) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)splat(x));
#else
    sum += bits<f32x16>(w << 16) * bits<float>(x << 16);
    return sum + bits<f32x16>(w & 0xffff0000u) * bits<float>(x & 0xffff0000u);
#endif
  }
};

// Signed weights times activations that are stored with 128 added, so that they are unsigned.
template <>
struct Lane<int8_t> {
  static constexpr int kPack = 4;
  typedef uint32_t Unit;
  typedef i32x16 Vec;
  typedef i32x16 Sum;
  static RAYLM_INLINE Sum dot(Sum sum, Vec w, Unit x) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)splat(x), (__m512i)w);
#else
    sum += (w >> 24) * int32_t(x >> 24);
    sum += ((w << 8) >> 24) * int32_t((x >> 16) & 255);
    sum += ((w << 16) >> 24) * int32_t((x >> 8) & 255);
    return sum + ((w << 24) >> 24) * int32_t(x & 255);
#endif
  }
};

// sums[r][v] += rows[r] . columns[v] over `units`: R rows of x times 16 columns in each of V streams. The units of
// stream v are `stride` 32-bit words apart, with 16 columns side by side. Prefetches the streams OWN units ahead, if it
// is not 0, and in each unit a cache line of each of AHEAD streams in `next`. Another call reads these soon, and their
// lines are `next_stride` bytes apart.
template <class T, int R, int V, int OWN = 0, int AHEAD = 0>
RAYLM_INLINE void multiply(typename Lane<T>::Sum (&sums)[R][V], const typename Lane<T>::Unit* x, ptrdiff_t x_stride,
                           const uint32_t* const (&streams)[V], ptrdiff_t stride, int units,
                           const char* const* next = nullptr, ptrdiff_t next_stride = 64) {
  typedef typename Lane<T>::Vec Vec;
  for (int u = 0; u < units; u++) {
    Vec w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      w[v] = load<Vec>(streams[v] + u * stride);
      if constexpr (OWN > 0) __builtin_prefetch(streams[v] + (u + OWN) * stride, 0, 3);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const typename Lane<T>::Unit unit = x[r * x_stride + u];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] = Lane<T>::dot(sums[r][v], w[v], unit);
    }
#pragma GCC unroll 4
    for (int a = 0; a < AHEAD; a++) __builtin_prefetch(next[a] + u * next_stride, 0, 2);
  }
}

}  // namespace raylm
