// Residual addition and RMS norm in one pass, to bf16 or to e4m3 with one scale a row.
#include "row.h"

namespace baton {

struct NormInputs {
  const Vector *x;       // bf16 [rows, hidden], or null
  Vector *residual;      // bf16 [rows, hidden]
  const Vector *weight;  // bf16 [hidden]
  float eps;
  float inverse_size;  // 1 / hidden
  int width;           // vectors in a row
};

template <int VECTORS>
__device__ __forceinline__ void add(RowShare<VECTORS> &row, const RowShare<VECTORS> &addend) {
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    float sums[VECTOR], values[VECTOR];
    unpack(row.vectors[i], sums);
    unpack(addend.vectors[i], values);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sums[j] += values[j];
    row.vectors[i] = pack(sums);
  }
}

template <int VECTORS>
__device__ __forceinline__ float sum_of_squares(const RowShare<VECTORS> &row) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    float values[VECTOR];
    unpack(row.vectors[i], values);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum += values[j] * values[j];
  }
  return sum;
}

// row * scale, rounded to bf16, times the weight, rounded to bf16.
template <int VECTORS>
__device__ __forceinline__ void apply(RowShare<VECTORS> &row, float scale, const RowShare<VECTORS> &weight) {
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    float values[VECTOR], weights[VECTOR];
    unpack(row.vectors[i], values);
    unpack(weight.vectors[i], weights);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) values[j] = round_to_bf16(values[j] * scale) * weights[j];
    row.vectors[i] = pack(values);
  }
}

// residual += x, rounded to bf16, if ADDS; gives the weighted norm of the sum.
template <int VECTORS, bool ADDS>
__device__ __forceinline__ RowShare<VECTORS> add_and_norm(const NormInputs &inputs) {
  __shared__ float partial[ROW_THREADS / WARP];
  release_successor();
  const auto weight = RowShare<VECTORS>::load_early(inputs.weight, inputs.width);
  wait_for_predecessor();
  const size_t start = static_cast<size_t>(blockIdx.x) * inputs.width;
  auto row = RowShare<VECTORS>::load(inputs.residual + start, inputs.width);
  if constexpr (ADDS) {
    add(row, RowShare<VECTORS>::load(inputs.x + start, inputs.width));
    row.store(inputs.residual + start, inputs.width);
  }
  const float squares = reduce_block(sum_of_squares(row), partial, Sum{});
  apply(row, rsqrtf(squares * inputs.inverse_size + inputs.eps), weight);
  return row;
}

template <int VECTORS, bool ADDS>
__global__ void __launch_bounds__(row_threads(VECTORS)) add_norm(NormInputs inputs, Vector *out) {
  const auto row = add_and_norm<VECTORS, ADDS>(inputs);
  row.store(out + static_cast<size_t>(blockIdx.x) * inputs.width, inputs.width);
}

template <int VECTORS, bool ADDS>
__global__ void __launch_bounds__(row_threads(VECTORS)) add_norm_quant(NormInputs inputs, uint2 *out, float *scales) {
  __shared__ float partial[ROW_THREADS / WARP];
  const auto row = add_and_norm<VECTORS, ADDS>(inputs);
  const float largest = fmaxf(reduce_block(row.absolute_maximum(), partial, Maximum{}), SMALLEST);
  if (threadIdx.x == 0) scales[blockIdx.x] = __fdiv_rn(largest, E4M3_MAX);
  row.store_quantized(out + static_cast<size_t>(blockIdx.x) * inputs.width, inputs.width, largest);
}

NormInputs norm_inputs(const void *x, void *residual, const void *weight, int hidden, float eps) {
  return {static_cast<const Vector *>(x), static_cast<Vector *>(residual), static_cast<const Vector *>(weight), eps,
          1.0f / static_cast<float>(hidden), hidden / VECTOR};
}

}  // namespace baton

// x may be null: the residual stays as it is. All are bf16 [rows, hidden], weight [hidden].
extern "C" int baton_add_norm(const void *x, void *residual, const void *weight, void *out, int rows, int hidden,
                              float eps, int overlap, cudaStream_t stream) {
  using namespace baton;
  if (rows == 0) return cudaSuccess;
  if (hidden % VECTOR != 0) return cudaErrorInvalidValue;
  const NormInputs inputs = norm_inputs(x, residual, weight, hidden, eps);
  return spread_row(inputs.width, [=](auto per_thread, int threads) {
    constexpr int vectors = decltype(per_thread)::value;
    const auto kernel = x == nullptr ? add_norm<vectors, false> : add_norm<vectors, true>;
    return launch(kernel, rows, threads, 0, stream, static_cast<Overlap>(overlap), inputs, out);
  });
}

// out is e4m3 [rows, hidden], scales float32 [rows]: a row's values are out * scale.
extern "C" int baton_add_norm_quant(const void *x, void *residual, const void *weight, void *out, void *scales,
                                    int rows, int hidden, float eps, int overlap, cudaStream_t stream) {
  using namespace baton;
  if (rows == 0) return cudaSuccess;
  if (hidden % VECTOR != 0) return cudaErrorInvalidValue;
  const NormInputs inputs = norm_inputs(x, residual, weight, hidden, eps);
  return spread_row(inputs.width, [=](auto per_thread, int threads) {
    constexpr int vectors = decltype(per_thread)::value;
    const auto kernel = x == nullptr ? add_norm_quant<vectors, false> : add_norm_quant<vectors, true>;
    return launch(kernel, rows, threads, 0, stream, static_cast<Overlap>(overlap), inputs, out, scales);
  });
}
