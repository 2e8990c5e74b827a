// A row spread over one block: thread t holds the vectors t, t + threads, t + 2 * threads, ...
//
// How a row is spread depends on its width alone, so its sums have one order whatever else is in the step.
#pragma once

#include "vector.h"

namespace baton {

constexpr int ROW_THREADS = 512;  // at most

// The threads of the widest block for rows of which each thread holds this many vectors, as `spread_row` divides them.
constexpr int row_threads(int vectors) { return vectors <= 4 ? 256 : ROW_THREADS; }

// This thread's share of a row; entries past the row's end are zero.
template <int VECTORS>
struct RowShare {
  Vector vectors[VECTORS];

  __device__ __forceinline__ static RowShare load(const Vector *row, int width) {
    RowShare share;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * blockDim.x;
      share.vectors[i] = at < width ? row[at] : Vector{0, 0, 0, 0};
    }
    return share;
  }

  // The same of a row that no kernel of the step writes, ahead of `wait_for_predecessor`; past the end is anything.
  __device__ __forceinline__ static RowShare load_early(const Vector *row, int width) {
    RowShare share;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * blockDim.x;
      share.vectors[i] = baton::load_early(row + min(at, width - 1));
    }
    return share;
  }

  __device__ __forceinline__ void store(Vector *row, int width) const {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * blockDim.x;
      if (at < width) row[at] = vectors[i];
    }
  }

  __device__ __forceinline__ float absolute_maximum() const {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      float values[VECTOR];
      unpack(vectors[i], values);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) most = fmaxf(most, fabsf(values[j]));
    }
    return most;
  }

  // Writes the row as e4m3 times 448 / largest, so that `largest` becomes the largest e4m3.
  __device__ __forceinline__ void store_quantized(uint2 *row, int width, float largest) const {
    const float factor = __fdiv_rn(E4M3_MAX, largest);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = threadIdx.x + i * blockDim.x;
      float values[VECTOR];
      unpack(vectors[i], values);
      if (at < width) row[at] = quantize(values, factor);
    }
  }
};

// Below this a row counts as zero: 448 / SMALLEST is still finite.
constexpr float SMALLEST = 1e-30f;

struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Maximum {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// `combine` over all threads of the block, the same bits in each. `partial` is shared memory, one float a warp, that
// nothing else uses during the call or, without a barrier between, before or after it.
template <typename Combine>
__device__ __forceinline__ float reduce_block(float value, float *partial, Combine combine) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(~0u, value, step));
  const int warps = blockDim.x / WARP;
  if (warps == 1) return value;
  const int lane = threadIdx.x % WARP;
  if (lane == 0) partial[threadIdx.x / WARP] = value;
  __syncthreads();
  value = partial[lane < warps ? lane : 0];
  value = lane < warps ? value : 0.0f;  // neutral: sums of squares and magnitudes are not negative
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

// Calls `run` with the number of vectors a thread holds, as a type, and the threads of a block for rows of `width`
// vectors. Few vectors a thread for narrow rows keep a lone row quick; 256 threads let eight wide rows share an SM.
template <int VECTORS>
struct PerThread {
  static constexpr int value = VECTORS;
};

template <typename Run>
cudaError_t spread_row(int width, Run run) {
  const auto threads = [width](int vectors) { return ((width + vectors - 1) / vectors + WARP - 1) / WARP * WARP; };
  if (width <= 256) return run(PerThread<1>{}, threads(1));
  if (width <= 512) return run(PerThread<2>{}, threads(2));
  if (width <= 1024) return run(PerThread<4>{}, threads(4));
  if (width <= 8 * ROW_THREADS) return run(PerThread<8>{}, threads(8));
  return cudaErrorInvalidValue;
}

}  // namespace baton
