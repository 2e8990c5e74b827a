// Sixteen float lanes, whatever the machine: one AVX-512 register, two AVX2 registers, or plain arrays.
//
// Each variant defines the type F16 (16 floats), the type W16 (16 words of 32 bits) and the same set of functions, so
// that every kernel is written once. A result never depends on where in a batch a row stands; it may differ in the
// last bits between variants.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace baton {

constexpr int kLanes = 16;

inline float widen(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// Rounds to the nearest bfloat16, ties to even.
inline uint16_t narrow(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((word >> 16) | 0x40u);
  return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

// Into the second-level cache: prefetches into the first level are limited to what its few miss buffers can carry.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace baton

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif

namespace baton {

inline F16 zero() { return splat(0.0f); }

// e^x to about one unit in the last place; 0 below -87.3, finite above 88.7.
inline F16 exponential(F16 x) {
  const F16 floor = splat(-87.3f);
  const F16 clamped = minimum(maximum(x, floor), splat(88.7f));
  // Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the sum.
  const F16 magic = splat(12582912.0f);
  const F16 biased = multiply_add(clamped, splat(1.44269504f), magic);
  const F16 n = subtract(biased, magic);
  F16 r = multiply_add(n, splat(-0.693359375f), clamped);
  r = multiply_add(n, splat(2.12194440e-4f), r);
  F16 p = splat(1.0f / 5040.0f);
  p = multiply_add(p, r, splat(1.0f / 720.0f));
  p = multiply_add(p, r, splat(1.0f / 120.0f));
  p = multiply_add(p, r, splat(1.0f / 24.0f));
  p = multiply_add(p, r, splat(1.0f / 6.0f));
  p = multiply_add(p, r, splat(0.5f));
  p = multiply_add(p, r, splat(1.0f));
  p = multiply_add(p, r, splat(1.0f));
  return zero_where_less(scale_by_power_of_two(p, biased), x, floor);
}

// 2^r to about one unit in the last place, for |r| <= 1/2.
inline F16 exp2_near_zero(F16 r) {
  F16 p = splat(1.54035304e-4f);
  p = multiply_add(p, r, splat(1.33335581e-3f));
  p = multiply_add(p, r, splat(9.61812911e-3f));
  p = multiply_add(p, r, splat(5.55041087e-2f));
  p = multiply_add(p, r, splat(0.240226507f));
  p = multiply_add(p, r, splat(0.693147181f));
  return multiply_add(p, r, splat(1.0f));
}

// 2^x for x <= 0 (a little more does no harm); 0 for very negative x, minus infinity included.
inline F16 exp2_downward(F16 x) {
  const F16 floor = splat(-126.0f);
  const F16 clamped = maximum(x, floor);
  const F16 magic = splat(12582912.0f);
  const F16 biased = add(clamped, magic);
  const F16 p = exp2_near_zero(subtract(clamped, subtract(biased, magic)));
  return zero_where_less(scale_by_power_of_two(p, biased), x, floor);
}

// x / (1 + e^-x)
inline F16 silu(F16 x) {
  return divide(x, add(splat(1.0f), exponential(subtract(zero(), x))));
}

}  // namespace baton
