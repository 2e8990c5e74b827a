// Residual addition and RMS norm in one pass, to bf16 or to e4m3 with one scale a row.
#include "row.h"

namespace baton {

// residual += x, rounded to bf16; gives the norm of the sum, rounded to bf16, times the weight, rounded to bf16.
template <int VECTORS>
__device__ __forceinline__ RowShare<VECTORS> add_and_norm(const Vector *x, Vector *residual, const Vector *weight,
                                                          float eps, int width) {
  __shared__ float partial[ROW_THREADS / WARP];
  release_successor();
  RowShare<VECTORS> scales;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    scales.vectors[i] = at < width ? __ldg(weight + at) : Vector{0, 0, 0, 0};
  }
  wait_for_predecessor();
  const size_t start = static_cast<size_t>(blockIdx.x) * width;
  auto row = RowShare<VECTORS>::load(residual + start, width);
  if (x != nullptr) {
    const auto addend = RowShare<VECTORS>::load(x + start, width);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      float a[VECTOR], b[VECTOR];
      unpack(row.vectors[i], a);
      unpack(addend.vectors[i], b);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) a[j] += b[j];
      row.vectors[i] = pack(a);
    }
    row.store(residual + start, width);
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    float values[VECTOR];
    unpack(row.vectors[i], values);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) squares += values[j] * values[j];
  }
  squares = reduce_block(squares, partial, Sum{});
  const float scale = rsqrtf(squares / static_cast<float>(width * VECTOR) + eps);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    float values[VECTOR], weights[VECTOR];
    unpack(row.vectors[i], values);
    unpack(scales.vectors[i], weights);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) values[j] = round_to_bf16(values[j] * scale) * weights[j];
    row.vectors[i] = pack(values);
  }
  return row;
}

template <int VECTORS>
__global__ void __launch_bounds__(ROW_THREADS)
    add_norm(const Vector *x, Vector *residual, const Vector *weight, float eps, Vector *out, int width) {
  const auto row = add_and_norm<VECTORS>(x, residual, weight, eps, width);
  row.store(out + static_cast<size_t>(blockIdx.x) * width, width);
}

template <int VECTORS>
__global__ void __launch_bounds__(ROW_THREADS) add_norm_quant(const Vector *x, Vector *residual, const Vector *weight,
                                                              float eps, uint2 *out, float *scales, int width) {
  __shared__ float partial[ROW_THREADS / WARP];
  const auto row = add_and_norm<VECTORS>(x, residual, weight, eps, width);
  const float largest = fmaxf(reduce_block(row.absolute_maximum(), partial, Maximum{}), SMALLEST);
  if (threadIdx.x == 0) scales[blockIdx.x] = __fdiv_rn(largest, E4M3_MAX);
  row.store_quantized(out + static_cast<size_t>(blockIdx.x) * width, width, largest);
}

}  // namespace baton

// x may be null: the residual stays as it is. All are bf16 [rows, hidden], weight [hidden].
extern "C" int baton_add_norm(const void *x, void *residual, const void *weight, void *out, int rows, int hidden,
                              float eps, int overlap, cudaStream_t stream) {
  using namespace baton;
  if (rows == 0) return cudaSuccess;
  if (hidden % VECTOR != 0) return cudaErrorInvalidValue;
  const int width = hidden / VECTOR;
  return spread_row(width, [=](auto per_thread, int threads) {
    return launch(add_norm<decltype(per_thread)::value>, rows, threads, 0, stream, static_cast<Overlap>(overlap), x,
                  residual, weight, eps, out, width);
  });
}

// out is e4m3 [rows, hidden], scales float32 [rows]: a row's values are out * scale.
extern "C" int baton_add_norm_quant(const void *x, void *residual, const void *weight, void *out, void *scales, int rows,
                                    int hidden, float eps, int overlap, cudaStream_t stream) {
  using namespace baton;
  if (rows == 0) return cudaSuccess;
  if (hidden % VECTOR != 0) return cudaErrorInvalidValue;
  const int width = hidden / VECTOR;
  return spread_row(width, [=](auto per_thread, int threads) {
    return launch(add_norm_quant<decltype(per_thread)::value>, rows, threads, 0, stream, static_cast<Overlap>(overlap),
                  x, residual, weight, eps, out, scales, width);
  });
}
