// Rows copied by index: the embedding of a step's tokens, and the rows whose logits are wanted.
#include "vector.h"

namespace baton {

constexpr int COPY_THREADS = 128;

// Both kernels copy one vector a thread. Grid: [rows, enough blocks for a row].

// A token outside the vocabulary gives a row of NaN: its logits are NaN and that request alone fails.
__global__ void __launch_bounds__(COPY_THREADS)
    embed(const int *tokens, const int *sources, const int *drawn, const Vector *table, Vector *out, int vocabulary,
          int width) {
  release_successor();
  wait_for_predecessor();
  const size_t row = blockIdx.x;
  const int at = blockIdx.y * COPY_THREADS + threadIdx.x;
  const int source = sources[row], given = tokens[row];
  const int token = source >= 0 ? drawn[source] : given;
  if (at >= width) return;
  const bool known = token >= 0 && token < vocabulary;
  out[row * width + at] = known ? table[static_cast<size_t>(token) * width + at] : Vector{~0u, ~0u, ~0u, ~0u};
}

__global__ void __launch_bounds__(COPY_THREADS) gather_rows(const Vector *x, const int *rows, Vector *out, int width) {
  release_successor();
  const size_t row = load_early(rows + blockIdx.x);
  const int at = blockIdx.y * COPY_THREADS + threadIdx.x;
  wait_for_predecessor();
  if (at < width) out[static_cast<size_t>(blockIdx.x) * width + at] = x[row * width + at];
}

inline dim3 copy_grid(int rows, int width) { return dim3(rows, (width + COPY_THREADS - 1) / COPY_THREADS); }

}  // namespace baton

// out[r] = table[sources[r] >= 0 ? drawn[sources[r]] : tokens[r]]; tokens, sources and drawn are int32, table bf16
// [vocabulary, hidden]. Never overlaps its predecessor: it starts a step, behind copies.
extern "C" int baton_embed(const void *tokens, const void *sources, const void *drawn, const void *table, void *out,
                           int rows, int vocabulary, int hidden, cudaStream_t stream) {
  using namespace baton;
  if (rows == 0) return cudaSuccess;
  if (hidden % VECTOR != 0) return cudaErrorInvalidValue;
  const int width = hidden / VECTOR;
  return launch(embed, copy_grid(rows, width), COPY_THREADS, 0, stream, Overlap::NO, tokens, sources, drawn, table, out,
                vocabulary, width);
}

// out[r] = x[rows[r]]; x and out are bf16 [.., hidden], rows int32, written before the step's first kernel.
extern "C" int baton_gather_rows(const void *x, const void *rows, void *out, int count, int hidden, int overlap,
                                 cudaStream_t stream) {
  using namespace baton;
  if (count == 0) return cudaSuccess;
  if (hidden % VECTOR != 0) return cudaErrorInvalidValue;
  const int width = hidden / VECTOR;
  return launch(gather_rows, copy_grid(count, width), COPY_THREADS, 0, stream, static_cast<Overlap>(overlap), x, rows,
                out, width);
}
