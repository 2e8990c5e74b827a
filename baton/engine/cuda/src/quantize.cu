// Rows of bf16 to e4m3 with one scale a row.
#include "row.h"

namespace baton {

template <int VECTORS>
__global__ void __launch_bounds__(row_threads(VECTORS))
    quantize_by_row(const Vector *x, uint2 *out, float *scales, int width) {
  __shared__ float partial[ROW_THREADS / WARP];
  release_successor();
  wait_for_predecessor();
  const size_t start = static_cast<size_t>(blockIdx.x) * width;
  const auto row = RowShare<VECTORS>::load(x + start, width);
  const float largest = fmaxf(reduce_block(row.absolute_maximum(), partial, Maximum{}), SMALLEST);
  if (threadIdx.x == 0) scales[blockIdx.x] = __fdiv_rn(largest, E4M3_MAX);
  row.store_quantized(out + start, width, largest);
}

}  // namespace baton

// x is bf16 [rows, width], out e4m3 [rows, width], scales float32 [rows]: a row's values are out * scale.
extern "C" int baton_quantize_by_row(const void *x, void *out, void *scales, int rows, int width, int overlap,
                                     cudaStream_t stream) {
  using namespace baton;
  if (rows == 0) return cudaSuccess;
  if (width % VECTOR != 0) return cudaErrorInvalidValue;
  return spread_row(width / VECTOR, [=](auto per_thread, int threads) {
    return launch(quantize_by_row<decltype(per_thread)::value>, rows, threads, 0, stream,
                  static_cast<Overlap>(overlap), x, out, scales, width / VECTOR);
  });
}
