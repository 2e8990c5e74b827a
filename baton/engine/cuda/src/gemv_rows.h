// The rows of a product of few rows: what the product is, how k is cut, and x brought to shared memory, normalised.
#pragma once

#include "gemv.h"

namespace baton::gemv {

using bf16 = __nv_bfloat16;
using fp8 = __nv_fp8_e4m3;

constexpr int MAX_ROWS = 16;
constexpr int TILE = 8;         // weight rows of one fragment
constexpr int STEP_BYTES = 64;  // what the four lanes of a weight row load at a time
constexpr int MAX_SHARED = 227 * 1024;

enum class Epilogue : int { STORE = 0, ADD = 1, SILU_MUL = 2 };

// What one product needs. `out` is [rows, n], or [rows, n / 2] for SILU_MUL, whose first n / 2 weight rows are the gate;
// ADD reads it too: out += product. With `gain` the product is that of rms_norm(x) * gain.
struct Product {
  const bf16 *x;
  const bf16 *gain;
  const void *weight;
  const float *weight_scale;  // [n], of e4m3 weights
  const bf16 *bias;           // [n]
  bf16 *out;
  float eps;
  int rows, n, k;
  Epilogue epilogue;
};

template <typename Weight>
struct Layout;

// Rows of x in shared memory are shifted against each other so that the lanes of a quarter warp hit different banks.
template <>
struct Layout<bf16> {
  static constexpr int LANE_VALUES = 8, SKEW_BYTES = 64;
};
template <>
struct Layout<fp8> {
  static constexpr int LANE_VALUES = 16, SKEW_BYTES = 16;
};

// How k is cut: every warp takes `batches` times UNROLL steps of 4 * LANE_VALUES values; past its slice it reads zeros.
struct Cut {
  int slice;    // steps of one warp
  int batches;  // ceil(slice / UNROLL)
  int pitch;    // bytes between rows of x in shared memory
};

template <typename Weight, int K_WARPS, int UNROLL>
__host__ __device__ Cut cut(int k) {
  const int values = 4 * Layout<Weight>::LANE_VALUES;
  const int steps = (k + values - 1) / values;
  const int slice = (steps + K_WARPS - 1) / K_WARPS;
  const int batches = (slice + UNROLL - 1) / UNROLL;
  const int bytes = ((K_WARPS - 1) * slice + batches * UNROLL) * values * static_cast<int>(sizeof(bf16));
  return {slice, batches, (bytes + 127) / 128 * 128 + Layout<Weight>::SKEW_BYTES};
}

// ------------------------------------------------------------------------------------------------------------- rows

__device__ __forceinline__ float squares(uint4 v) {
  float sum = 0.f;
#pragma unroll
  for (unsigned pair : {v.x, v.y, v.z, v.w}) {
    const float2 f = widen(pair);
    sum = fmaf(f.x, f.x, fmaf(f.y, f.y, sum));
  }
  return sum;
}

// The norm is rounded to bf16 before the gain and after it.
__device__ __forceinline__ unsigned norm_pair(unsigned x, unsigned gain, float scale) {
  const float2 value = widen(x), by = widen(gain);
  return narrow(round_bf16(value.x * scale) * by.x, round_bf16(value.y * scale) * by.y);
}

// Replaces the rows in shared memory by rms_norm(row) * gain. Each thread reads and writes the vectors it copied.
template <int THREADS>
__device__ void normalise(const Product &p, char *x, int pitch, const char *gain, float (*partial)[THREADS / WARP]) {
  const int vectors = p.k / 8, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  for (int row = 0; row < p.rows; ++row) {
    float sum = 0.f;
    for (int v = threadIdx.x; v < vectors; v += THREADS)
      sum += squares(*reinterpret_cast<const uint4 *>(x + row * pitch + v * LOAD_BYTES));
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) partial[row][warp] = sum;
  }
  __syncthreads();
  for (int row = 0; row < p.rows; ++row) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < THREADS / WARP; ++w) sum += partial[row][w];
    const float scale = rsqrtf(sum / static_cast<float>(p.k) + p.eps);
    for (int v = threadIdx.x; v < vectors; v += THREADS) {
      uint4 *const at = reinterpret_cast<uint4 *>(x + row * pitch + v * LOAD_BYTES);
      const uint4 value = *at, by = *reinterpret_cast<const uint4 *>(gain + v * LOAD_BYTES);
      *at = make_uint4(norm_pair(value.x, by.x, scale), norm_pair(value.y, by.y, scale),
                       norm_pair(value.z, by.z, scale), norm_pair(value.w, by.w, scale));
    }
  }
}

// What the tensor cores take beside weights of either type.
__device__ __forceinline__ void convert(const Product &, char *, int, int, bf16) {}

// Rows in shared memory from bf16 to halves, since e4m3 weights become halves in the fewest instructions. Each thread
// reads and writes the vectors it copied.
__device__ __forceinline__ void convert(const Product &p, char *x, int pitch, int threads, fp8) {
  for (int row = 0; row < p.rows; ++row)
    for (int v = threadIdx.x; v < p.k / 8; v += threads) {
      uint4 *const at = reinterpret_cast<uint4 *>(x + row * pitch + v * LOAD_BYTES);
      const uint4 value = *at;
      *at = make_uint4(bf16_to_f16(value.x), bf16_to_f16(value.y), bf16_to_f16(value.z), bf16_to_f16(value.w));
    }
}

// Brings x to shared memory, normalised where there is a gain, with zeros up to the pitch.
template <typename Weight, int THREADS>
__device__ __forceinline__ void stage_rows(const Product &p, char *x, int pitch, const char *gain,
                                           float (*partial)[THREADS / WARP]) {
  for (int row = 0; row < p.rows; ++row)
    for (int v = threadIdx.x; v < pitch / LOAD_BYTES; v += THREADS) {
      const bool inside = v * 8 < p.k;
      copy_async(x + row * pitch + v * LOAD_BYTES, p.x + (inside ? static_cast<size_t>(row) * p.k + v * 8 : 0), inside);
    }
  wait_for_copies();
  if (p.gain != nullptr) normalise<THREADS>(p, x, pitch, gain, partial);
  convert(p, x, pitch, THREADS, Weight());
  __syncthreads();
}

}  // namespace baton::gemv
