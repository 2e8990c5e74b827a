// silu(gate) * up over rows of [gate, up], to bf16 or to e4m3 with one scale a row.
#include "row.h"

namespace baton {

constexpr int SILU_THREADS = 256;
constexpr int MOST_ROWS = 65'535;  // blocks in a grid's second dimension
constexpr int SMS = 132;  // of an H200; only a hint here

// Eight values; silu is rounded to bf16, and so is its product with `up`. The quick exponential and division stay
// within a few units of float32's last place, far inside bf16's rounding.
__device__ __forceinline__ Vector silu_mul(Vector gate, Vector up) {
  float gates[VECTOR], ups[VECTOR];
  unpack(gate, gates);
  unpack(up, ups);
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    ups[j] *= round_to_bf16(__fdividef(gates[j], 1.0f + __expf(-gates[j])));
  }
  return pack(ups);
}

// One vector a thread. Grid: [enough blocks for a row, rows].
__global__ void __launch_bounds__(SILU_THREADS) silu_mul_rows(const Vector *gate_up, Vector *out, int width) {
  release_successor();
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  const Vector *gate = gate_up + static_cast<size_t>(blockIdx.y) * 2 * width + at;
  wait_for_predecessor();
  if (at < width) out[static_cast<size_t>(blockIdx.y) * width + at] = silu_mul(gate[0], gate[width]);
}

template <int VECTORS>
__global__ void __launch_bounds__(row_threads(VECTORS))
    silu_mul_quant(const Vector *gate_up, uint2 *out, float *scales, int width) {
  __shared__ float partial[ROW_THREADS / WARP];
  release_successor();
  wait_for_predecessor();
  const Vector *gate = gate_up + static_cast<size_t>(blockIdx.x) * 2 * width;
  auto row = RowShare<VECTORS>::load(gate, width);
  const auto up = RowShare<VECTORS>::load(gate + width, width);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) row.vectors[i] = silu_mul(row.vectors[i], up.vectors[i]);
  const float largest = fmaxf(reduce_block(row.absolute_maximum(), partial, Maximum{}), SMALLEST);
  if (threadIdx.x == 0) scales[blockIdx.x] = __fdiv_rn(largest, E4M3_MAX);
  row.store_quantized(out + static_cast<size_t>(blockIdx.x) * width, width, largest);
}

}  // namespace baton

// gate_up is bf16 [rows, 2 * ffn], out bf16 [rows, ffn].
extern "C" int baton_silu_mul(const void *gate_up, void *out, int rows, int ffn, int overlap, cudaStream_t stream) {
  using namespace baton;
  if (rows == 0) return cudaSuccess;
  if (ffn % VECTOR != 0) return cudaErrorInvalidValue;
  const int width = ffn / VECTOR;
  const bool few = static_cast<int64_t>(rows) * width < SMS * SILU_THREADS;  // then spread over more SMs
  const int threads = few ? 64 : width % SILU_THREADS == 0 ? SILU_THREADS : SILU_THREADS / 2;
  const int blocks = (width + threads - 1) / threads;
  for (int first = 0; first < rows; first += MOST_ROWS) {  // a mixture has a row for each expert that a token meets
    const dim3 grid(blocks, rows - first < MOST_ROWS ? rows - first : MOST_ROWS);
    const Vector *from = static_cast<const Vector *>(gate_up) + static_cast<size_t>(first) * 2 * width;
    Vector *to = static_cast<Vector *>(out) + static_cast<size_t>(first) * width;
    const cudaError_t status =
        launch(silu_mul_rows, grid, threads, 0, stream, static_cast<Overlap>(overlap), from, to, width);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// out is e4m3 [rows, ffn], scales float32 [rows]: a row's values are out * scale.
extern "C" int baton_silu_mul_quant(const void *gate_up, void *out, void *scales, int rows, int ffn, int overlap,
                                    cudaStream_t stream) {
  using namespace baton;
  if (rows == 0) return cudaSuccess;
  if (ffn % VECTOR != 0) return cudaErrorInvalidValue;
  const int width = ffn / VECTOR;
  return spread_row(width, [=](auto per_thread, int threads) {
    return launch(silu_mul_quant<decltype(per_thread)::value>, rows, threads, 0, stream, static_cast<Overlap>(overlap),
                  gate_up, out, scales, width);
  });
}
