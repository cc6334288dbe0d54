// Rounds float weights to the 16 steps of 4-bit groups (grouped.h) during loading.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "grouped.h"
#include "vector.h"

namespace raylm {

constexpr int kClips = 11;
constexpr float kClipStep = 0.04f;

// The weights of a group in steps from its zero, and the squared error in squared steps. Scale and zero have the
// precision that grouped.h keeps.
struct Int4Steps {
  float scale, zero;

  Int4Steps(float low, float high)
      : scale(kept_scale(std::max((high - low) / 15, 1e-12f))),
        zero(std::min(std::nearbyint(-low / scale / kZeroStep), float(kZeroMask)) * kZeroStep) {}

  // `exact` in steps, to the nearest of the steps 0 to 15.
  RAYLM_INLINE f32x16 of(f32x16 exact) const {
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 nearest = max((exact + zero + magic) - magic, splat(0.0f));
    return -max(-nearest, splat(-15.0f));
  }

  template <class T>
  float error(const T* weight, int group) const {
    f32x16 wrong = {};
    for (int i = 0; i < group; i += kLanes) {
      const f32x16 exact = load_wide(weight + i) / scale, off = of(exact) - zero - exact;
      wrong += off * off;
    }
    return sum(wrong) * scale * scale;
  }
};

// One group, a multiple of 16. The bounds are its smallest and largest weight, both reduced towards 0 by the share that
// minimizes the squared error.
template <class T>
void round_int4(const T* weight, int group, uint8_t* values, float* scale, float* zero) {
  f32x16 high = {}, low = {};
  for (int i = 0; i < group; i += kLanes) {
    high = max(high, load_wide(weight + i));
    low = max(low, -load_wide(weight + i));
  }
  const float top = highest(high), bottom = -highest(low);
  Int4Steps best(bottom, top);
  float least = std::numeric_limits<float>::infinity();
  for (int clip = 0; clip < kClips; clip++) {
    const float share = 1 - kClipStep * clip;
    const Int4Steps steps(share * bottom, share * top);
    const float error = steps.error(weight, group);
    if (error < least) least = error, best = steps;
  }
  for (int i = 0; i < group; i += kLanes) {
    const f32x16 step = best.of(load_wide(weight + i) / best.scale);
    store_narrowed(values + i, convert<i32x16>(step));
  }
  *scale = best.scale;
  *zero = best.zero;
}

}  // namespace raylm
