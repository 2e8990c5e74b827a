// What becomes of the sums of stream_k.cu: parts of a tile come together, are scaled, rounded and written.
#pragma once

#include "common.h"
#include "tma.h"

namespace baton {
namespace {

using bf16 = __nv_bfloat16;

constexpr int GROUP_THREADS = 128;

struct Product {
  const bf16 *bias;           // [n]
  const float *x_scale;       // [rows], of e4m3 operands
  const float *weight_scale;  // [n]
  bf16 *out;
  float4 *parts;  // of blocks that do not begin a tile, as their threads hold them
  int *ready;     // for each block and warpgroup: its part is written. All zero between launches.
  int rows, n, k;
};

// The barrier of one warpgroup of consumers.
__device__ __forceinline__ void sync_group(int group) {
  if (group == 0)
    asm volatile("bar.sync 1, 128;" ::: "memory");
  else
    asm volatile("bar.sync 2, 128;" ::: "memory");
}

// Leaves a part of a tile's sums to the block that began the tile.
template <int COLUMNS>
__device__ void leave_part(const Product &p, const float (&sums)[COLUMNS / 2], int slot, int group) {
  const int thread = threadIdx.x % GROUP_THREADS;
  float4 *const to = p.parts + static_cast<size_t>(slot) * (COLUMNS / 8) * GROUP_THREADS + thread;
#pragma unroll
  for (int i = 0; i < COLUMNS / 8; ++i)
    __stcg(to + i * GROUP_THREADS, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
  __threadfence();
  sync_group(group);
  if (thread == 0) asm volatile("st.relaxed.gpu.global.s32 [%0], 1;" ::"l"(p.ready + slot) : "memory");
}

// Waits until the parts in the slots first, first + step, ... are written, one thread for each.
__device__ __forceinline__ void wait_for_parts(const Product &p, int first, int step, int count, int group) {
  for (int i = threadIdx.x % GROUP_THREADS; i < count; i += GROUP_THREADS) {
    int *const flag = p.ready + first + i * step;
    int ready = 0;
#pragma unroll 1
    for (unsigned polls = 0; ready == 0; ++polls) {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(ready) : "l"(flag) : "memory");
      if (polls == PATIENCE) __trap();
    }
    *flag = 0;
  }
  sync_group(group);
}

template <int COLUMNS>
__device__ void take_part(const Product &p, float (&sums)[COLUMNS / 2], int slot) {
  const int thread = threadIdx.x % GROUP_THREADS;
  const float4 *const from = p.parts + static_cast<size_t>(slot) * (COLUMNS / 8) * GROUP_THREADS + thread;
#pragma unroll
  for (int i = 0; i < COLUMNS / 8; ++i) {
    const float4 part = __ldcg(from + i * GROUP_THREADS);
    sums[4 * i] += part.x, sums[4 * i + 1] += part.y, sums[4 * i + 2] += part.z, sums[4 * i + 3] += part.w;
  }
}

__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

__device__ __forceinline__ float biased(float sum, bool has_bias, float bias) {
  return has_bias ? __bfloat162float(__float2bfloat16_rn(sum)) + bias : sum;
}

// Two sums of one weight row, rounded, and turned so that a lane holds two weight rows of one row of x.
__device__ __forceinline__ uint32_t turn(float a, float b, bool has_bias, float bias) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(biased(a, has_bias, bias), biased(b, has_bias, bias));
  return transpose(*reinterpret_cast<const uint32_t *>(&pair));
}

// Two sums of a weight row and those of the eighth after it times their scales. Rows that are not there stay unscaled.
__device__ __forceinline__ void apply_scales(const Product &p, float *sums, float low, float high, int row) {
  const float first = row < p.rows ? p.x_scale[row] : 0.f, second = row + 1 < p.rows ? p.x_scale[row + 1] : 0.f;
  sums[0] *= low * first, sums[1] *= low * second;
  sums[2] *= high * first, sums[3] *= high * second;
}

// The sums of a whole tile times the scales of their weight rows and of their rows of x.
template <int COLUMNS>
__device__ void scale_tile(const Product &p, float (&sums)[COLUMNS / 2], int weight_row, int row) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x % GROUP_THREADS / WARP;
  const int mine = weight_row + warp * 16 + lane / 4;
  const float low = mine < p.n ? p.weight_scale[mine] : 0.f;
  const float high = mine + 8 < p.n ? p.weight_scale[mine + 8] : 0.f;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) apply_scales(p, sums + 4 * j, low, high, row + 8 * j + lane % 4 * 2);
}

template <int COLUMNS>
__device__ void write_tile(const Product &p, const float (&sums)[COLUMNS / 2], int weight_row, int row) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x % GROUP_THREADS / WARP;
  const int first = weight_row + warp * 16, mine = first + lane / 4, pair = first + lane % 4 * 2;
  const bool has_bias = p.bias != nullptr;
  const float low_bias = has_bias && mine < p.n ? __bfloat162float(p.bias[mine]) : 0.f;
  const float high_bias = has_bias && mine + 8 < p.n ? __bfloat162float(p.bias[mine + 8]) : 0.f;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const uint32_t low = turn(sums[4 * j], sums[4 * j + 1], has_bias, low_bias);
    const uint32_t high = turn(sums[4 * j + 2], sums[4 * j + 3], has_bias, high_bias);
    const int at = row + 8 * j + lane / 4;
    uint32_t *const to = reinterpret_cast<uint32_t *>(p.out + static_cast<size_t>(at) * p.n + pair);
    if (at < p.rows && pair < p.n) to[0] = low;
    if (at < p.rows && pair + 8 < p.n) to[4] = high;
  }
}

}  // namespace
}  // namespace baton
