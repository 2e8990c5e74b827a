// Decode attention's arithmetic: one warp's running softmax over its pieces, and how parts of a result come together.
#pragma once

#include <math.h>

#include "decode_shares.h"

namespace baton::decoding {

constexpr float NEGATIVE = -INFINITY;

// The query heads of one group as the left operand, and what has been summed up for them. Row g of the tile is head
// lane / 4; of it, this lane holds what the layout of m16n8k16 gives it.
template <typename Kv, int DIM>
struct Accumulator {
  using L = Layout<Kv, DIM>;
  static constexpr bool IS_FP8 = sizeof(Kv) == 1;
  uint32_t q[DIM / 16][2];
  float sums[L::SUMS][4];
  float peak;   // of the scores, in units of log2
  float total;  // of the weights, over this lane's columns

  __device__ __forceinline__ void start(const __nv_bfloat16* query, int group, int lane) {
    const int head = lane / 4, column = lane % 4;
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
      q[step][0] = q[step][1] = 0;
      if (head < group) {
        const __nv_bfloat16* at = query + head * DIM + step * 16;
        // For e4m3 each lane's four columns are neighbours; K is read in the same order.
        q[step][0] = load(at + (IS_FP8 ? column * 4 : column * 2));
        q[step][1] = load(at + (IS_FP8 ? column * 4 + 2 : column * 2 + 8));
      }
    }
#pragma unroll
    for (int tile = 0; tile < L::SUMS; ++tile) sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0.0f;
    peak = NEGATIVE;
    total = 0.0f;
  }

  static __device__ __forceinline__ uint32_t load(const __nv_bfloat16* at) {
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(at);
    if constexpr (!IS_FP8) return pair;
    return pack<Kv>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }

  // Scores of 16 keys: scores[0] are keys 0 to 7, scores[1] keys 8 to 15.
  __device__ __forceinline__ void score(float (&scores)[2][4], uint32_t keys, int lane) const {
    float odd[2][4] = {};
    const int matrix = lane / 8, row = lane % 8;
    if constexpr (!IS_FP8) {
      const int token = (matrix >> 1) * 8 + row;
#pragma unroll
      for (int step = 0; step < DIM / 16; ++step) {
        uint32_t k[4];
        load_matrices(k, keys + L::offset(token, 2 * step + (matrix & 1)));
        multiply<Kv>(step & 1 ? odd[0] : scores[0], q[step][0], q[step][1], k[0], k[1]);
        multiply<Kv>(step & 1 ? odd[1] : scores[1], q[step][0], q[step][1], k[2], k[3]);
      }
    } else {
      const int token = (matrix & 1) * 8 + row;
#pragma unroll
      for (int step = 0; step < DIM / 16; step += 2) {
        uint32_t k[4];
        load_matrices(k, keys + L::offset(token, step + (matrix >> 1)));
        const uint2 halves[4] = {e4m3_to_f16(k[0]), e4m3_to_f16(k[1]), e4m3_to_f16(k[2]), e4m3_to_f16(k[3])};
        multiply<Kv>(scores[0], q[step][0], q[step][1], halves[0].x, halves[0].y);
        multiply<Kv>(scores[1], q[step][0], q[step][1], halves[1].x, halves[1].y);
        multiply<Kv>(odd[0], q[step + 1][0], q[step + 1][1], halves[2].x, halves[2].y);
        multiply<Kv>(odd[1], q[step + 1][0], q[step + 1][1], halves[3].x, halves[3].y);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scores[half][0] += odd[half][0];
      scores[half][1] += odd[half][1];
    }
  }

  // Takes in one piece of keys and values; of its tokens those from `first` to before `last` are visible.
  __device__ __forceinline__ void take(uint32_t keys, int first, int last, float scale_log2, int lane) {
    float scores[2][4] = {};
    score(scores, keys, lane);
    float best = NEGATIVE;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int token = half * 8 + lane % 4 * 2 + column;
        const bool visible = token >= first && token < last;
        scores[half][column] = visible ? scores[half][column] * scale_log2 : NEGATIVE;
        best = fmaxf(best, scores[half][column]);
      }
    }
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
    const float new_peak = fmaxf(peak, best);
    const float reference = new_peak == NEGATIVE ? 0.0f : new_peak;
    const float shrink = power_of_two(peak - reference);
    peak = new_peak;
    if (__any_sync(~0u, shrink != 1.0f)) shrink_sums(shrink);  // the peak of a long row soon stays where it is
    float weights[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        weights[half][column] = power_of_two(scores[half][column] - reference);
        total += weights[half][column];
      }
    }
    add(keys + L::PIECE_BYTES, pack<Kv>(weights[0][0], weights[0][1]), pack<Kv>(weights[1][0], weights[1][1]), lane);
  }

  __device__ __forceinline__ void shrink_sums(float factor) {
    total *= factor;
#pragma unroll
    for (int tile = 0; tile < L::SUMS; ++tile) {
      sums[tile][0] *= factor;
      sums[tile][1] *= factor;
    }
  }

  __device__ __forceinline__ void add(uint32_t values, uint32_t low, uint32_t high, int lane) {
    const int matrix = lane / 8, token = (matrix & 1) * 8 + lane % 8;
#pragma unroll
    for (int step = 0; step < L::CHUNKS; step += 2) {
      uint32_t v[4];
      load_transposed(v, values + L::offset(token, step + (matrix >> 1)));
      if constexpr (!IS_FP8) {
        multiply<Kv>(sums[step], low, high, v[0], v[1]);
        multiply<Kv>(sums[step + 1], low, high, v[2], v[3]);
      } else {  // a transposed pair of bytes is two columns: tile 2c has the even ones, tile 2c + 1 the odd ones
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          const uint2 upper = e4m3_to_f16(interleave(v[2 * chunk])), lower = e4m3_to_f16(interleave(v[2 * chunk + 1]));
          multiply<Kv>(sums[2 * (step + chunk)], low, high, upper.x, lower.x);
          multiply<Kv>(sums[2 * (step + chunk) + 1], low, high, upper.y, lower.y);
        }
      }
    }
  }

  // Writes this warp's part.
  __device__ __forceinline__ void store(float* to, int group, int lane) const {
    const int head = lane / 4, column = lane % 4;
    float whole = total;
    whole += __shfl_xor_sync(~0u, whole, 1);
    whole += __shfl_xor_sync(~0u, whole, 2);
    if (head >= group) return;
    float* row = to + head * DIM;
#pragma unroll
    for (int tile = 0; tile < L::SUMS; tile += 2) {
      if constexpr (!IS_FP8) {
        *reinterpret_cast<float2*>(row + tile * 8 + column * 2) = make_float2(sums[tile][0], sums[tile][1]);
        *reinterpret_cast<float2*>(row + tile * 8 + 8 + column * 2) = make_float2(sums[tile + 1][0], sums[tile + 1][1]);
      } else {
        *reinterpret_cast<float4*>(row + tile * 8 + column * 4) =
            make_float4(sums[tile][0], sums[tile + 1][0], sums[tile][1], sums[tile + 1][1]);
      }
    }
    if (column == 0) *reinterpret_cast<float2*>(to + group * DIM + head * 2) = make_float2(peak, whole);
  }
};

// Weighted parts of one head's result: four columns, peak and total.
struct Merged {
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float peak = NEGATIVE;
  float total = 0.0f;

  __device__ __forceinline__ void add(float4 part, float2 state) {
    const float new_peak = fmaxf(peak, state.x);
    const float reference = new_peak == NEGATIVE ? 0.0f : new_peak;
    const float old_weight = exp2f(peak - reference), weight = exp2f(state.x - reference);
    sum.x = sum.x * old_weight + part.x * weight;
    sum.y = sum.y * old_weight + part.y * weight;
    sum.z = sum.z * old_weight + part.z * weight;
    sum.w = sum.w * old_weight + part.w * weight;
    total = total * old_weight + state.y * weight;
    peak = new_peak;
  }
};

}  // namespace baton::decoding
