// Operations on single rows: RMS norm and rotary embedding. Always float32 inside.
#pragma once

#include <cmath>

#include "element.h"

namespace baton {

// 1 / sqrt(mean(x^2) + eps); `size` is a multiple of 16.
inline float inverse_rms(const float* x, int size, float eps) {
  F16 sum = zero();
  for (int i = 0; i < size; i += kLanes) {
    const F16 part = load(x + i);
    sum = multiply_add(part, part, sum);
  }
  return 1.0f / std::sqrt(lane_sum(sum) / static_cast<float>(size) + eps);
}

// out = x * inverse_rms(x) * weight
template <class E>
void normalize(const float* x, const float* weight, int size, float eps, typename E::Store* out) {
  const F16 scale = splat(inverse_rms(x, size, eps));
  for (int i = 0; i < size; i += kLanes) {
    E::store(out + i, multiply(load(weight + i), multiply(load(x + i), scale)));
  }
}

// cosines and sines [size] of position * frequency
inline void rope_angles(int position, const float* frequencies, int size, float* cosines, float* sines) {
  for (int i = 0; i < size; ++i) {
    const float angle = static_cast<float>(position) * frequencies[i];
    cosines[i] = std::cos(angle);
    sines[i] = std::sin(angle);
  }
}

// Rotates one head in the half-split layout: element i pairs with i + head_dim / 2. `norm` is the head's RMS norm
// weight, applied before, or null.
template <class E>
void rotate_head(const float* x, const float* norm, float eps, const float* cosines, const float* sines, int head_dim,
                 typename E::Store* out) {
  const int half = head_dim / 2;
  const F16 scale = splat(norm == nullptr ? 1.0f : inverse_rms(x, head_dim, eps));
  for (int i = 0; i < half; i += kLanes) {
    F16 low = load(x + i);
    F16 high = load(x + half + i);
    if (norm != nullptr) {
      low = multiply(load(norm + i), multiply(low, scale));
      high = multiply(load(norm + half + i), multiply(high, scale));
    }
    const F16 cosine = load(cosines + i);
    const F16 sine = load(sines + i);
    E::store(out + i, subtract(multiply(low, cosine), multiply(high, sine)));
    E::store(out + half + i, multiply_add(high, cosine, multiply(low, sine)));
  }
}

template <class E>
void convert(const float* x, int size, typename E::Store* out) {
  for (int i = 0; i < size; i += kLanes) E::store(out + i, load(x + i));
}

}  // namespace baton
