// Rotary embedding of fresh q and k, with their norms where the model has them, and k and v into the paged KV cache.
//
// LANES threads share a head: lane l holds the vectors l of the head's lower and of its upper half, which rotary
// embedding pairs. A warp so takes 32 / LANES heads, and one row of a lone sequence spreads over several SMs.
#include "vector.h"

namespace baton {

constexpr int ROPE_THREADS = 128;
// Blocks that share an SM, as many as go without spilling registers.
constexpr int rope_blocks(bool norms) { return norms ? 7 : 12; }

struct RopeInputs {
  Vector *qkv;           // bf16 [rows, (heads + 2 * kv_heads) * head_dim]
  const int *positions;  // [rows]
  const int *slots;      // [rows]; negative: leave the row alone
  const uint4 *cos;      // float32 [context, head_dim / 2]
  const uint4 *sin;
  const Vector *q_norm;  // bf16 [head_dim], or null
  const Vector *k_norm;
  float eps;
};

struct RopeShape {
  int heads, kv_heads;
  int half;  // vectors in half a head
  float inverse_size;  // 1 / head_dim
};

// A layer of the pool [blocks, layers, 2, kv_heads, block_size, head_dim]. Offsets count elements.
template <typename Element>
struct CacheLayer {
  Element *keys;  // of block 0
  Element *values;
  int64_t block_stride;
  int block_size, head_dim;
  float key_factor, value_factor;  // what values are multiplied by before they become e4m3

  __device__ __forceinline__ int64_t offset(int slot, int head) const {
    const int block = slot / block_size;
    return block * block_stride + (static_cast<int64_t>(head) * block_size + slot % block_size) * head_dim;
  }
};

__device__ __forceinline__ void store_cached(__nv_bfloat16 *to, Vector packed, float) {
  *reinterpret_cast<Vector *>(to) = packed;
}

__device__ __forceinline__ void store_cached(__nv_fp8_storage_t *to, Vector packed, float factor) {
  float values[VECTOR];
  unpack(packed, values);
  *reinterpret_cast<uint2 *>(to) = quantize(values, factor);
}

__device__ __forceinline__ void load_table(const uint4 *row, int lane, float (&values)[VECTOR]) {
  const uint4 first = load_early(row + 2 * lane), second = load_early(row + 2 * lane + 1);
  const uint32_t words[VECTOR] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) values[j] = __uint_as_float(words[j]);
}

// RMS norm of the head that LANES threads hold, rounded to bf16, times its weight, rounded to bf16.
template <int LANES>
__device__ __forceinline__ void norm_head(float (&low)[VECTOR], float (&high)[VECTOR], Vector low_weight,
                                          Vector high_weight, float eps, float inverse_size) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) squares += low[j] * low[j] + high[j] * high[j];
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const float scale = rsqrtf(squares * inverse_size + eps);
  float weights[VECTOR];
  unpack(low_weight, weights);
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) low[j] = round_to_bf16(round_to_bf16(low[j] * scale) * weights[j]);
  unpack(high_weight, weights);
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) high[j] = round_to_bf16(round_to_bf16(high[j] * scale) * weights[j]);
}

// In float32, each product rounded before the sum, as the reference does it.
__device__ __forceinline__ void rotate(float (&low)[VECTOR], float (&high)[VECTOR], const float (&cos)[VECTOR],
                                       const float (&sin)[VECTOR]) {
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    const float rotated = __fsub_rn(__fmul_rn(low[j], cos[j]), __fmul_rn(high[j], sin[j]));
    high[j] = __fadd_rn(__fmul_rn(high[j], cos[j]), __fmul_rn(low[j], sin[j]));
    low[j] = rotated;
  }
}

// Grid: [rows, enough blocks for all heads of q, k and v].
template <int LANES, bool NORMS, typename Element>
__global__ void __launch_bounds__(ROPE_THREADS, rope_blocks(NORMS))
    rope_append(RopeInputs inputs, RopeShape shape, CacheLayer<Element> cache) {
  release_successor();
  const int row = blockIdx.x;
  const int lane = threadIdx.x % LANES;
  const int head = (blockIdx.y * ROPE_THREADS + threadIdx.x) / LANES;
  const int first_key = shape.heads, first_value = shape.heads + shape.kv_heads;
  const int heads = first_value + shape.kv_heads;
  const bool holds = head < heads && lane < shape.half;
  const bool rotates = holds && head < first_value;
  const int slot = load_early(inputs.slots + row), position = load_early(inputs.positions + row);
  float cos[VECTOR], sin[VECTOR];
  Vector low_weight{}, high_weight{};
  if (rotates) {
    const size_t table_row = static_cast<size_t>(slot < 0 ? 0 : position) * 2 * shape.half;
    load_table(inputs.cos + table_row, lane, cos);
    load_table(inputs.sin + table_row, lane, sin);
    if constexpr (NORMS) {
      const Vector *norm = (head < first_key ? inputs.q_norm : inputs.k_norm) + lane;
      low_weight = load_early(norm), high_weight = load_early(norm + shape.half);
    }
  }
  wait_for_predecessor();
  Vector *at = inputs.qkv + (static_cast<size_t>(row) * heads + head) * 2 * shape.half + lane;
  Vector low_packed{}, high_packed{};
  if (holds) low_packed = at[0], high_packed = at[shape.half];
  float low[VECTOR], high[VECTOR];
  unpack(low_packed, low);
  unpack(high_packed, high);
  if constexpr (NORMS) {  // in every thread, for the sake of the shuffles; values stay packed as they came
    norm_head<LANES>(low, high, low_weight, high_weight, inputs.eps, shape.inverse_size);
  }
  if (rotates) {
    rotate(low, high, cos, sin);
    low_packed = pack(low), high_packed = pack(high);
  }
  if (!holds || slot < 0) return;
  if (head < first_key) {
    at[0] = low_packed, at[shape.half] = high_packed;
    return;
  }
  const bool is_key = head < first_value;
  Element *side = is_key ? cache.keys : cache.values;
  Element *to = side + cache.offset(slot, head - (is_key ? first_key : first_value)) + lane * VECTOR;
  const float factor = is_key ? cache.key_factor : cache.value_factor;
  store_cached(to, low_packed, factor);
  store_cached(to + shape.half * VECTOR, high_packed, factor);
}

template <int LANES, typename Element>
auto rope_kernel(const RopeInputs &inputs) {
  return inputs.q_norm == nullptr ? rope_append<LANES, false, Element> : rope_append<LANES, true, Element>;
}

struct RopeSizes {
  int rows, heads, kv_heads, head_dim;
};

struct PoolSizes {
  int layers, block_size;
};

template <typename Element>
CacheLayer<Element> cache_layer(void *pool, int layer, const RopeSizes &sizes, const PoolSizes &pool_sizes) {
  const int64_t side = static_cast<int64_t>(sizes.kv_heads) * pool_sizes.block_size * sizes.head_dim;
  Element *keys = static_cast<Element *>(pool) + 2 * side * layer;
  return {keys, keys + side, 2 * side * pool_sizes.layers, pool_sizes.block_size, sizes.head_dim, 1.0f, 1.0f};
}

template <typename Element>
cudaError_t launch_rope(const RopeInputs &inputs, const RopeSizes &sizes, const CacheLayer<Element> &cache,
                        int overlap, cudaStream_t stream) {
  if (sizes.rows == 0) return cudaSuccess;
  const int half = sizes.head_dim / (2 * VECTOR);
  if (half * 2 * VECTOR != sizes.head_dim) return cudaErrorInvalidValue;
  const RopeShape shape{sizes.heads, sizes.kv_heads, half, 1.0f / sizes.head_dim};
  const auto run = [&](auto kernel, int lanes) {
    const int heads = sizes.heads + 2 * sizes.kv_heads;
    const dim3 grid(sizes.rows, (heads * lanes + ROPE_THREADS - 1) / ROPE_THREADS);
    return launch(kernel, grid, ROPE_THREADS, 0, stream, static_cast<Overlap>(overlap), inputs, shape, cache);
  };
  if (half <= 1) return run(rope_kernel<1, Element>(inputs), 1);
  if (half <= 2) return run(rope_kernel<2, Element>(inputs), 2);
  if (half <= 4) return run(rope_kernel<4, Element>(inputs), 4);
  if (half <= 8) return run(rope_kernel<8, Element>(inputs), 8);
  if (half <= 16) return run(rope_kernel<16, Element>(inputs), 16);
  return cudaErrorInvalidValue;
}

}  // namespace baton

// q is rotated in place inside qkv, k is rotated and goes with v into layer `layer` of the bf16 pool. positions, slots
// and the tables must be written before the step's first kernel: they are read while the predecessor may still run.
extern "C" int baton_rope_append(void *qkv, const int *positions, const int *slots, const void *cos, const void *sin,
                                 const void *q_norm, const void *k_norm, void *pool, int rows, int heads, int kv_heads,
                                 int head_dim, int layers, int block_size, int layer, float eps, int overlap,
                                 cudaStream_t stream) {
  using namespace baton;
  const RopeInputs inputs{static_cast<Vector *>(qkv),          positions,
                          slots,                               static_cast<const uint4 *>(cos),
                          static_cast<const uint4 *>(sin),    static_cast<const Vector *>(q_norm),
                          static_cast<const Vector *>(k_norm), eps};
  const RopeSizes sizes{rows, heads, kv_heads, head_dim};
  return launch_rope(inputs, sizes, cache_layer<__nv_bfloat16>(pool, layer, sizes, {layers, block_size}), overlap,
                     stream);
}

// The same into an e4m3 pool that holds k * key_factor and v * value_factor.
extern "C" int baton_rope_append_quant(void *qkv, const int *positions, const int *slots, const void *cos,
                                       const void *sin, const void *q_norm, const void *k_norm, void *pool, int rows,
                                       int heads, int kv_heads, int head_dim, int layers, int block_size, int layer,
                                       float eps, float key_factor, float value_factor, int overlap,
                                       cudaStream_t stream) {
  using namespace baton;
  const RopeInputs inputs{static_cast<Vector *>(qkv),          positions,
                          slots,                               static_cast<const uint4 *>(cos),
                          static_cast<const uint4 *>(sin),    static_cast<const Vector *>(q_norm),
                          static_cast<const Vector *>(k_norm), eps};
  const RopeSizes sizes{rows, heads, kv_heads, head_dim};
  auto cache = cache_layer<__nv_fp8_storage_t>(pool, layer, sizes, {layers, block_size});
  cache.key_factor = key_factor;
  cache.value_factor = value_factor;
  return launch_rope(inputs, sizes, cache, overlap, stream);
}
