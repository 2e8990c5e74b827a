// Lanes as plain arrays, for machines without AVX2. Included by simd.h only.
#pragma once

#include <algorithm>

namespace baton {

constexpr const char* kLaneKind = "generic";
constexpr int kRegisters = 4;

struct F16 {
  float v[kLanes];
};
struct W16 {
  uint32_t v[kLanes];
};

template <class Lane>
inline F16 lanes(Lane lane) {
  F16 out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = lane(i);
  return out;
}

inline F16 splat(float x) {
  return lanes([&](int) { return x; });
}
inline F16 load(const float* p) {
  return lanes([&](int i) { return p[i]; });
}
inline void store(float* p, F16 x) { std::memcpy(p, x.v, sizeof x.v); }
inline F16 add(F16 a, F16 b) {
  return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline F16 subtract(F16 a, F16 b) {
  return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline F16 multiply(F16 a, F16 b) {
  return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline F16 divide(F16 a, F16 b) {
  return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
// Rounds twice: without FMA hardware a true fused operation is a library call.
inline F16 multiply_add(F16 a, F16 b, F16 c) {
  return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline F16 maximum(F16 a, F16 b) {
  return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 minimum(F16 a, F16 b) {
  return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}

inline float lane_sum(F16 x) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x.v[i] += x.v[i + width];
  }
  return x.v[0];
}

inline float lane_maximum(F16 x) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x.v[i] = std::max(x.v[i], x.v[i + width]);
  }
  return x.v[0];
}

inline F16 load_bf16(const uint16_t* p) {
  return lanes([&](int i) { return widen(p[i]); });
}
inline void store_bf16(uint16_t* p, F16 x) {
  for (int i = 0; i < kLanes; ++i) p[i] = narrow(x.v[i]);
}

// Lanes [begin, end) keep x, the others get `fill`.
inline F16 keep_lanes(F16 x, int begin, int end, F16 fill) {
  return lanes([&](int i) { return i >= begin && i < end ? x.v[i] : fill.v[i]; });
}

inline F16 zero_where_less(F16 value, F16 x, F16 limit) {
  return lanes([&](int i) { return x.v[i] < limit.v[i] ? 0.0f : value.v[i]; });
}

// value * 2^n, with n in the low bits of `biased` (see exponential).
inline F16 scale_by_power_of_two(F16 value, F16 biased) {
  W16 bits;
  std::memcpy(bits.v, biased.v, sizeof bits.v);
  for (uint32_t& word : bits.v) word = (word << 23) + 0x3f800000u;
  F16 power;
  std::memcpy(power.v, bits.v, sizeof power.v);
  return multiply(value, power);
}

inline W16 load_words(const uint32_t* p) {
  W16 out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
inline void store_words(uint32_t* p, W16 x) { std::memcpy(p, x.v, sizeof x.v); }
inline W16 splat_word(uint32_t x) {
  W16 out;
  std::fill(out.v, out.v + kLanes, x);
  return out;
}
inline F16 as_floats(W16 x) {
  F16 out;
  std::memcpy(out.v, x.v, sizeof out.v);
  return out;
}

// Words of two bfloat16, the first from `even`, the second from `odd`.
inline W16 interleave_bf16(const uint16_t* even, const uint16_t* odd) {
  W16 out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = even[i] | static_cast<uint32_t>(odd[i]) << 16;
  return out;
}

// sum + a.first * b.first + a.second * b.second for words of two bfloat16, in one fixed order.
inline F16 dot_bf16(F16 sum, W16 a, W16 b) {
  W16 a_odd, b_odd, a_even, b_even;
  for (int i = 0; i < kLanes; ++i) {
    a_odd.v[i] = a.v[i] & 0xffff0000u;
    b_odd.v[i] = b.v[i] & 0xffff0000u;
    a_even.v[i] = a.v[i] << 16;
    b_even.v[i] = b.v[i] << 16;
  }
  const F16 first = multiply_add(as_floats(a_even), as_floats(b_even), sum);
  return multiply_add(as_floats(a_odd), as_floats(b_odd), first);
}

// Sixteen rows of sixteen words, transposed: to[i * to_stride + j] = rows[j][i].
inline void transpose_words(const uint32_t* const* rows, uint32_t* to, int to_stride) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) to[i * to_stride + j] = rows[j][i];
  }
}

}  // namespace baton
