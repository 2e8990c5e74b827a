// Rows copied by index: the embedding of a step's tokens, and the rows whose logits are wanted.
#include "vector.h"

namespace baton {

constexpr int COPY_THREADS = 256;

__device__ __forceinline__ void copy_row(const Vector *from, Vector *to, int width) {
  for (int at = threadIdx.x; at < width; at += blockDim.x) to[at] = from[at];
}

// A token outside the vocabulary gives a row of NaN: its logits are NaN and that request alone fails.
__global__ void __launch_bounds__(COPY_THREADS)
    embed(const int *tokens, const int *sources, const int *drawn, const Vector *table, Vector *out, int vocabulary,
          int width) {
  release_successor();
  wait_for_predecessor();
  const int row = blockIdx.x;
  const int source = sources[row];
  const int token = source >= 0 ? drawn[source] : tokens[row];
  Vector *to = out + static_cast<size_t>(row) * width;
  if (token >= 0 && token < vocabulary) {
    copy_row(table + static_cast<size_t>(token) * width, to, width);
  } else {
    for (int at = threadIdx.x; at < width; at += blockDim.x) to[at] = {~0u, ~0u, ~0u, ~0u};
  }
}

__global__ void __launch_bounds__(COPY_THREADS)
    gather_rows(const Vector *x, const int *rows, Vector *out, int width) {
  release_successor();
  const size_t row = rows[blockIdx.x];
  wait_for_predecessor();
  copy_row(x + row * width, out + static_cast<size_t>(blockIdx.x) * width, width);
}

inline int copy_threads(int width) { return width >= COPY_THREADS ? COPY_THREADS : (width + WARP - 1) / WARP * WARP; }

}  // namespace baton

// out[r] = table[sources[r] >= 0 ? drawn[sources[r]] : tokens[r]]; tokens, sources and drawn are int32, table bf16
// [vocabulary, hidden]. Never overlaps its predecessor: it starts a step, behind copies.
extern "C" int baton_embed(const void *tokens, const void *sources, const void *drawn, const void *table, void *out,
                           int rows, int vocabulary, int hidden, cudaStream_t stream) {
  using namespace baton;
  if (rows == 0) return cudaSuccess;
  if (hidden % VECTOR != 0) return cudaErrorInvalidValue;
  const int width = hidden / VECTOR;
  return launch(embed, rows, copy_threads(width), 0, stream, Overlap::NO, tokens, sources, drawn, table, out, vocabulary,
                width);
}

// out[r] = x[rows[r]]; x and out are bf16 [.., hidden], rows int32, written before the step's first kernel.
extern "C" int baton_gather_rows(const void *x, const void *rows, void *out, int count, int hidden, int overlap,
                                 cudaStream_t stream) {
  using namespace baton;
  if (count == 0) return cudaSuccess;
  if (hidden % VECTOR != 0) return cudaErrorInvalidValue;
  const int width = hidden / VECTOR;
  return launch(gather_rows, count, copy_threads(width), 0, stream, static_cast<Overlap>(overlap), x, rows, out, width);
}
