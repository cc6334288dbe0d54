// Sixteen lanes of 32 bits, and the operation that differs between instruction sets: the dot product of packed pairs.
//
// They are one AVX-512 register, two of AVX2, four of SSE or NEON. GCC keeps a vector that is wider than a register in
// memory and fills it lane by lane, so that kernels take 5 to 20 times as long. So a wider vector is a pair of halves here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define RAYLM_INLINE inline __attribute__((always_inline))

namespace raylm {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr size_t kRegister = 64;
#elif defined(__AVX2__)
constexpr size_t kRegister = 32;
#else
constexpr size_t kRegister = 16;
#endif

template <class H>
struct Pair {
  typedef H Half;
  Half low, high;
};

template <class V>
constexpr bool kIsPair = false;
template <class Half>
constexpr bool kIsPair<Pair<Half>> = true;

template <class T, int N>
struct Vector {
  typedef T Type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N>
  requires(N * sizeof(T) > kRegister)
struct Vector<T, N> {
  typedef Pair<typename Vector<T, N / 2>::Type> Type;
};

typedef Vector<float, kLanes>::Type f32x16;
typedef Vector<int32_t, kLanes>::Type i32x16;
typedef Vector<uint32_t, kLanes>::Type u32x16;

template <class V>
RAYLM_INLINE V load(const void* from) {
  if constexpr (kIsPair<V>) {
    typedef typename V::Half Half;
    return {load<Half>(from), load<Half>(static_cast<const char*>(from) + sizeof(Half))};
  } else {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
}

template <class V>
RAYLM_INLINE void store(void* to, V v) {
  if constexpr (kIsPair<V>) {
    store(to, v.low);
    store(static_cast<char*>(to) + sizeof v.low, v.high);
  } else {
    std::memcpy(to, &v, sizeof v);
  }
}

// All lanes with the same value.
template <class V, class S>
RAYLM_INLINE V all(S x) {
  if constexpr (kIsPair<V>) {
    return {all<typename V::Half>(x), all<typename V::Half>(x)};
  } else {
    return V{} + x;
  }
}
RAYLM_INLINE f32x16 splat(float x) { return all<f32x16>(x); }
RAYLM_INLINE u32x16 splat(uint32_t x) { return all<u32x16>(x); }
RAYLM_INLINE i32x16 splat(int32_t x) { return all<i32x16>(x); }

// The same bits with another type.
template <class To, class From>
RAYLM_INLINE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  if constexpr (kIsPair<To>) {
    return {bits<typename To::Half>(from.low), bits<typename To::Half>(from.high)};
  } else {
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
  }
}

// The same numbers with another type of 32 bits.
template <class To, class From>
RAYLM_INLINE To convert(From from) {
  if constexpr (kIsPair<To>) {
    return {convert<typename To::Half>(from.low), convert<typename To::Half>(from.high)};
  } else {
    return __builtin_convertvector(from, To);
  }
}

// Numbers that have a shorter type N in memory.
template <class V, class N>
RAYLM_INLINE V widened(const N* from) {
  if constexpr (kIsPair<V>) {
    typedef typename V::Half Half;
    return {widened<Half>(from), widened<Half>(from + sizeof(Half) / 4)};
  } else {
    return __builtin_convertvector(load<typename Vector<N, sizeof(V) / 4>::Type>(from), V);
  }
}

template <class N, class V>
RAYLM_INLINE void store_narrowed(N* to, V v) {
  if constexpr (kIsPair<V>) {
    store_narrowed(to, v.low);
    store_narrowed(to + sizeof v.low / 4, v.high);
  } else {
    typedef typename Vector<N, sizeof(V) / 4>::Type Narrow;
    store(to, __builtin_convertvector(v, Narrow));
  }
}

// Operators of pairs, also with one number for all lanes, as the compiler's vectors have them.
#define RAYLM_PAIRWISE(OP)                                                      \
  template <class H>                                                            \
  RAYLM_INLINE auto operator OP(Pair<H> a, Pair<H> b) {                         \
    return Pair<decltype(a.low OP b.low)>{a.low OP b.low, a.high OP b.high};    \
  }                                                                             \
  template <class H, class S>                                                   \
    requires std::is_arithmetic_v<S>                                            \
  RAYLM_INLINE auto operator OP(Pair<H> a, S b) {                               \
    return Pair<decltype(a.low OP b)>{a.low OP b, a.high OP b};                 \
  }                                                                             \
  template <class H, class S>                                                   \
    requires std::is_arithmetic_v<S>                                            \
  RAYLM_INLINE auto operator OP(S a, Pair<H> b) {                               \
    return Pair<decltype(a OP b.low)>{a OP b.low, a OP b.high};                 \
  }

RAYLM_PAIRWISE(+)
RAYLM_PAIRWISE(-)
RAYLM_PAIRWISE(*)
RAYLM_PAIRWISE(/)
RAYLM_PAIRWISE(&)
RAYLM_PAIRWISE(|)
RAYLM_PAIRWISE(<<)
RAYLM_PAIRWISE(>>)
RAYLM_PAIRWISE(<)
RAYLM_PAIRWISE(>)
RAYLM_PAIRWISE(>=)
RAYLM_PAIRWISE(==)
RAYLM_PAIRWISE(!=)

template <class H>
RAYLM_INLINE Pair<H> operator-(Pair<H> a) { return {-a.low, -a.high}; }
template <class H>
RAYLM_INLINE Pair<H> operator~(Pair<H> a) { return {~a.low, ~a.high}; }
template <class H, class B>
RAYLM_INLINE Pair<H>& operator+=(Pair<H>& a, B b) { return a = a + b; }
template <class H, class B>
RAYLM_INLINE Pair<H>& operator-=(Pair<H>& a, B b) { return a = a - b; }
template <class H>
RAYLM_INLINE Pair<H>& operator|=(Pair<H>& a, Pair<H> b) { return a = a | b; }

// Of each lane `a` if the lane of the mask is set, else `b`.
template <class M, class V>
RAYLM_INLINE V select(M mask, V a, V b) {
  if constexpr (kIsPair<V>) {
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
  } else {
    return mask ? a : b;
  }
}

RAYLM_INLINE f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

template <class V>
RAYLM_INLINE auto sum(V v) {
  if constexpr (kIsPair<V>) {
    return sum(v.low + v.high);
  } else {
    auto total = v[0];
    for (size_t i = 1; i < sizeof v / sizeof v[0]; i++) total += v[i];
    return total;
  }
}

template <class V>
RAYLM_INLINE float highest(V v) {
  if constexpr (kIsPair<V>) {
    return highest(select(v.low > v.high, v.low, v.high));
  } else {
    float top = v[0];
    for (size_t i = 1; i < sizeof v / sizeof v[0]; i++) top = v[i] > top ? v[i] : top;
    return top;
  }
}

#if defined(__AVX512F__)
RAYLM_INLINE float sum(f32x16 v) { return _mm512_reduce_add_ps((__m512)v); }
RAYLM_INLINE int32_t sum(i32x16 v) { return _mm512_reduce_add_epi32((__m512i)v); }
RAYLM_INLINE float highest(f32x16 v) { return _mm512_reduce_max_ps((__m512)v); }
#endif

// Whether any lane is not 0.
template <class V>
RAYLM_INLINE bool any(V v) {
  if constexpr (kIsPair<V>) {
    return any(v.low | v.high);
  } else {
    int32_t found = 0;
    for (size_t i = 0; i < sizeof v / sizeof v[0]; i++) found |= v[i];
    return found != 0;
  }
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
  const u32x16 nan = bits<u32x16>((raw & 0x7fffffffu) > 0x7f800000u);
  return (nan & (raw | 0x400000u)) | (~nan & up);
}

RAYLM_INLINE f32x16 load_wide(const float* from) { return load<f32x16>(from); }
RAYLM_INLINE f32x16 load_wide(const bf16* from) {
  return bits<f32x16>(widened<u32x16>(&from->raw) << 16);
}
RAYLM_INLINE void store_narrow(float* to, f32x16 v) { store(to, v); }
RAYLM_INLINE void store_narrow(bf16* to, f32x16 v) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
  const __m256bh packed = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(to, &packed, 32);
#else
  store_narrowed(&to->raw, rounded(v) >> 16);
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
