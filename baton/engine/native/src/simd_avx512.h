// AVX-512 lanes. Included by simd.h only.
#pragma once

#include <immintrin.h>

namespace baton {

constexpr const char* kLaneKind =
#if defined(__AVX512BF16__)
    "avx512bf16";
#else
    "avx512";
#endif
constexpr int kRegisters = 32;  // registers of 16 lanes

struct F16 {
  __m512 v;
};
struct W16 {
  __m512i v;
};

inline F16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 subtract(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 multiply(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 divide(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 multiply_add(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 maximum(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 minimum(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline float lane_sum(F16 x) { return _mm512_reduce_add_ps(x.v); }
inline float lane_maximum(F16 x) { return _mm512_reduce_max_ps(x.v); }

inline F16 load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}

inline void store_bf16(uint16_t* p, F16 x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x.v));
#else
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m512i word = _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(word));
#endif
}

// Lanes [begin, end) keep x, the others get `fill`.
inline F16 keep_lanes(F16 x, int begin, int end, F16 fill) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 low = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(begin));
  const __mmask16 keep = _mm512_mask_cmplt_epi32_mask(low, lane, _mm512_set1_epi32(end));
  return {_mm512_mask_blend_ps(keep, fill.v, x.v)};
}

inline F16 zero_where_less(F16 value, F16 x, F16 limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), value.v)};
}

// value * 2^n, with n in the low bits of `biased` (see exponential).
inline F16 scale_by_power_of_two(F16 value, F16 biased) {
  const __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(biased.v), 23);
  const __m512i power = _mm512_add_epi32(shifted, _mm512_set1_epi32(0x3f800000));
  return {_mm512_mul_ps(value.v, _mm512_castsi512_ps(power))};
}

inline W16 load_words(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_words(uint32_t* p, W16 x) { _mm512_storeu_si512(p, x.v); }
inline W16 splat_word(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
inline F16 as_floats(W16 x) { return {_mm512_castsi512_ps(x.v)}; }

// Words of two bfloat16, the first from `even`, the second from `odd`.
inline W16 interleave_bf16(const uint16_t* even, const uint16_t* odd) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
  return {_mm512_or_si512(low, _mm512_slli_epi32(high, 16))};
}

// sum + a.first * b.first + a.second * b.second for words of two bfloat16, in one fixed order.
inline F16 dot_bf16(F16 sum, W16 a, W16 b) {
#if defined(__AVX512BF16__)
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512 a_odd = _mm512_castsi512_ps(_mm512_and_si512(a.v, high));
  const __m512 b_odd = _mm512_castsi512_ps(_mm512_and_si512(b.v, high));
  const __m512 a_even = _mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16));
  const __m512 b_even = _mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16));
  return {_mm512_fmadd_ps(a_odd, b_odd, _mm512_fmadd_ps(a_even, b_even, sum.v))};
#endif
}

// Sixteen rows of sixteen words, transposed: to[i * to_stride + j] = rows[j][i].
inline void transpose_words(const uint32_t* const* rows, uint32_t* to, int to_stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i]);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // Now a[4 * q + c] holds, in its 128-bit part p, word 4 * p + c of rows 4 * q .. 4 * q + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i lo01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x44);
    const __m512i hi01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xee);
    const __m512i lo23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x44);
    const __m512i hi23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xee);
    _mm512_storeu_si512(to + (0 + c) * to_stride, _mm512_shuffle_i32x4(lo01, lo23, 0x88));
    _mm512_storeu_si512(to + (4 + c) * to_stride, _mm512_shuffle_i32x4(lo01, lo23, 0xdd));
    _mm512_storeu_si512(to + (8 + c) * to_stride, _mm512_shuffle_i32x4(hi01, hi23, 0x88));
    _mm512_storeu_si512(to + (12 + c) * to_stride, _mm512_shuffle_i32x4(hi01, hi23, 0xdd));
  }
}

}  // namespace baton
