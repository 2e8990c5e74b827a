// What becomes of the sums of mid_rows.cu: the parts of a tile, one in each block that shares its k, come together in
// shared memory, are scaled, rounded and written.
#pragma once

#include "common.h"
#include "tma.h"
#include "wgmma.h"

namespace baton::mid_rows {

using bf16 = __nv_bfloat16;
using fp8 = __nv_fp8_e4m3;

constexpr int MOST_BLOCKS = 8;  // in a cluster
constexpr int VECTOR = 8;       // outputs that a thread finishes at a time

struct Product {
  const bf16 *bias;           // [n], or null
  const float *x_scale;       // [rows], of e4m3 operands
  const float *weight_scale;  // [n]
  bf16 *out;
  int rows, n, k, splits;  // blocks that share the k of a tile
};

// A part of a tile's sums in shared memory: for each row of x the sums of all weight rows, and four more places, so that
// neither the lanes that write nor those that read meet in a bank.
template <int WEIGHT_ROWS>
struct Part {
  static constexpr int PITCH = WEIGHT_ROWS + 4, VECTORS = WEIGHT_ROWS / VECTOR;
};

// What the outputs of a tile are scaled by and what is added to them.
template <int WEIGHT_ROWS, int COLUMNS>
struct Terms {
  float weight_scale[WEIGHT_ROWS], bias[WEIGHT_ROWS], x_scale[COLUMNS];

  // A value by each thread. No kernel writes these, so they may be read before the kernel before has finished.
  template <typename Value>
  __device__ void load_weights(const Product &p, int first, int thread) {
    if (thread >= WEIGHT_ROWS) return;
    const bool inside = first + thread < p.n;
    if constexpr (sizeof(Value) == 1) weight_scale[thread] = inside ? p.weight_scale[first + thread] : 0.f;
    bias[thread] = inside && p.bias != nullptr ? __bfloat162float(p.bias[first + thread]) : 0.f;
  }

  template <typename Value>
  __device__ void load_rows(const Product &p, int thread) {
    if constexpr (sizeof(Value) == 1)
      if (thread < COLUMNS) x_scale[thread] = thread < p.rows ? __ldcg(p.x_scale + thread) : 0.f;
  }
};

// Leaves the sums of one warpgroup, of the weight rows from `first` of the tile on, at `part`.
template <int WEIGHT_ROWS, int COLUMNS>
__device__ __forceinline__ void leave_part(uint32_t part, const float (&sums)[COLUMNS / 2], int first) {
  constexpr int PITCH = Part<WEIGHT_ROWS>::PITCH;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x % GROUP_THREADS / WARP;
  const uint32_t to = part + 4 * (lane % 4 * 2 * PITCH + first + warp * 16 + lane / 4);
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    store_at(to + 4 * (8 * j * PITCH), sums[4 * j]);
    store_at(to + 4 * ((8 * j + 1) * PITCH), sums[4 * j + 1]);
    store_at(to + 4 * (8 * j * PITCH + 8), sums[4 * j + 2]);
    store_at(to + 4 * ((8 * j + 1) * PITCH + 8), sums[4 * j + 3]);
  }
}

// Eight sums at `address` of each of the blocks rank, rank + step, ..., added in this order.
__device__ __forceinline__ void add_parts(float (&sums)[VECTOR], uint32_t address, int rank, int step, int splits) {
  float4 low[MOST_BLOCKS], high[MOST_BLOCKS];
#pragma unroll
  for (int s = 0; s < MOST_BLOCKS; ++s) {
    if (s >= splits) break;
    const uint32_t there = address_at(address, rank + s * step);
    low[s] = load_from(there), high[s] = load_from(there + 16);
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) sums[i] = 0.f;
#pragma unroll
  for (int s = 0; s < MOST_BLOCKS; ++s) {
    if (s >= splits) break;
    sums[0] += low[s].x, sums[1] += low[s].y, sums[2] += low[s].z, sums[3] += low[s].w;
    sums[4] += high[s].x, sums[5] += high[s].y, sums[6] += high[s].z, sums[7] += high[s].w;
  }
}

__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

// Finishes this block's share of a tile that begins at weight row `first`: every `splits`-th of the runs of THREADS
// vectors, from the parts in the blocks of the cluster that have the same tile.
template <typename Value, int WEIGHT_ROWS, int COLUMNS, int PAIR, int THREADS>
__device__ void write_share(const Product &p, const Terms<WEIGHT_ROWS, COLUMNS> &terms, uint32_t part, int first,
                            int split, int pair) {
  using P = Part<WEIGHT_ROWS>;
  const int vectors = p.rows * P::VECTORS;
  for (int i = split * THREADS + static_cast<int>(threadIdx.x); i < vectors; i += p.splits * THREADS) {
    const int row = i / P::VECTORS, in_tile = i % P::VECTORS * VECTOR;
    if (first + in_tile >= p.n) continue;
    float sums[VECTOR];
    add_parts(sums, part + 4 * (row * P::PITCH + in_tile), pair, PAIR, p.splits);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if constexpr (sizeof(Value) == 1) sums[j] *= terms.weight_scale[in_tile + j] * terms.x_scale[row];
      sums[j] += terms.bias[in_tile + j];
    }
    *reinterpret_cast<uint4 *>(p.out + static_cast<size_t>(row) * p.n + first + in_tile) =
        make_uint4(round_pair(sums[0], sums[1]), round_pair(sums[2], sums[3]), round_pair(sums[4], sums[5]),
                   round_pair(sums[6], sums[7]));
  }
}

}  // namespace baton::mid_rows
