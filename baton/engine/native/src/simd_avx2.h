// AVX2 + FMA lanes: two registers of eight. Included by simd.h only.
#pragma once

#include <immintrin.h>

namespace baton {

constexpr const char* kLaneKind = "avx2";
constexpr int kRegisters = 8;

struct F16 {
  __m256 lo, hi;
};
struct W16 {
  __m256i lo, hi;
};

inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 subtract(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 multiply(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 divide(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 multiply_add(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F16 maximum(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 minimum(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

inline float lane_sum(F16 x) {
  const __m256 eight = _mm256_add_ps(x.lo, x.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline float lane_maximum(F16 x) {
  const __m256 eight = _mm256_max_ps(x.lo, x.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline __m256i widen_words(const uint16_t* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline F16 load_bf16(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(widen_words(p), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(widen_words(p + 8), 16))};
}

inline __m256i round_to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}

inline void store_bf16(uint16_t* p, F16 x) {
  const __m256i packed = _mm256_packus_epi32(round_to_bf16(x.lo), round_to_bf16(x.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

inline __m256 keep_eight(__m256 x, int begin, int end, __m256 fill) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane);
  const __m256i inside = _mm256_andnot_si256(below, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
  return _mm256_blendv_ps(fill, x, _mm256_castsi256_ps(inside));
}

// Lanes [begin, end) keep x, the others get `fill`.
inline F16 keep_lanes(F16 x, int begin, int end, F16 fill) {
  return {keep_eight(x.lo, begin, end, fill.lo), keep_eight(x.hi, begin - 8, end - 8, fill.hi)};
}

inline F16 zero_where_less(F16 value, F16 x, F16 limit) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_LT_OQ), value.lo),
          _mm256_andnot_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_LT_OQ), value.hi)};
}

inline __m256 power_of_two(__m256 biased) {
  const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(biased), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(shifted, _mm256_set1_epi32(0x3f800000)));
}

// value * 2^n, with n in the low bits of `biased` (see exponential).
inline F16 scale_by_power_of_two(F16 value, F16 biased) {
  return {_mm256_mul_ps(value.lo, power_of_two(biased.lo)), _mm256_mul_ps(value.hi, power_of_two(biased.hi))};
}

inline __m256i load_eight(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline W16 load_words(const uint32_t* p) { return {load_eight(p), load_eight(p + 8)}; }
inline void store_words(uint32_t* p, W16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.hi);
}
inline W16 splat_word(uint32_t x) {
  const __m256i word = _mm256_set1_epi32(static_cast<int>(x));
  return {word, word};
}
inline F16 as_floats(W16 x) { return {_mm256_castsi256_ps(x.lo), _mm256_castsi256_ps(x.hi)}; }

// Words of two bfloat16, the first from `even`, the second from `odd`.
inline W16 interleave_bf16(const uint16_t* even, const uint16_t* odd) {
  return {_mm256_or_si256(widen_words(even), _mm256_slli_epi32(widen_words(odd), 16)),
          _mm256_or_si256(widen_words(even + 8), _mm256_slli_epi32(widen_words(odd + 8), 16))};
}

inline __m256 dot_eight(__m256 sum, __m256i a, __m256i b) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256 a_odd = _mm256_castsi256_ps(_mm256_and_si256(a, high));
  const __m256 b_odd = _mm256_castsi256_ps(_mm256_and_si256(b, high));
  const __m256 a_even = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
  const __m256 b_even = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
  return _mm256_fmadd_ps(a_odd, b_odd, _mm256_fmadd_ps(a_even, b_even, sum));
}

// sum + a.first * b.first + a.second * b.second for words of two bfloat16, in one fixed order.
inline F16 dot_bf16(F16 sum, W16 a, W16 b) { return {dot_eight(sum.lo, a.lo, b.lo), dot_eight(sum.hi, a.hi, b.hi)}; }

// Sixteen rows of sixteen words, transposed: to[i * to_stride + j] = rows[j][i].
inline void transpose_words(const uint32_t* const* rows, uint32_t* to, int to_stride) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) to[i * to_stride + j] = rows[j][i];
  }
}

}  // namespace baton
