// Matrix products over packed panels.
//
// Each output element has one accumulator that takes the words of the reduced dimension in ascending order with one
// operation per word, whatever the number of rows, the tile they fall in or the thread that runs them. So a row's
// result has the same bits alone and in any batch.
#pragma once

#include <utility>

#include "panel.h"

namespace baton {

constexpr int kTileRows = 6;
// Up to this many rows, members split the columns among themselves and each streams its weights once.
constexpr int kStreamRows = 32;
// Above it, tasks are blocks of this many rows by one panel.
constexpr int kBlockRows = 96;
// Depth of a piece of a panel that stays in the second-level cache together with the next one: 192 KiB.
constexpr int kPieceSteps = 768;

// What a kernel asks of the memory while it computes: `lines` cache lines per step, 256 bytes apart from step to step.
struct Ahead {
  const uint32_t* from = nullptr;
  int lines = 0;
};

// Whether a kernel's sums begin at zero or at what `out` holds.
enum class Sums { kFresh, kContinued };

// out[i][0 .. 16 * Vectors) = begin + sum over s of words(row i, s) * b(s, column); out has a row stride of 64.
template <class E, Sums Begin, int Rows, int Vectors>
void tile_part(const uint32_t* a, ptrdiff_t a_stride, const uint32_t* b, int steps, float* out, Ahead ahead) {
  F16 sum[Rows][Vectors];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      sum[i][v] = Begin == Sums::kFresh ? zero() : load(out + i * kPanelColumns + v * kLanes);
    }
  }
  for (int s = 0; s < steps; ++s) {
    W16 weights[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) weights[v] = load_words(b + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const W16 value = splat_word(a[i * a_stride + s]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[i][v] = E::dot(sum[i][v], weights[v], value);
    }
    b += kPanelColumns;
    for (int line = 0; line < ahead.lines; ++line) prefetch(ahead.from + line * kLanes);
    ahead.from += kPanelColumns;
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(out + i * kPanelColumns + v * kLanes, sum[i][v]);
  }
}

// Splits a tile so that its accumulators fit the registers.
template <class E, Sums Begin, int Rows, int Vectors>
void tile(const uint32_t* a, ptrdiff_t a_stride, const uint32_t* b, int steps, float* out, Ahead ahead) {
  constexpr int fitting = std::max(1, (kRegisters - 2) / (Rows + 1));
  constexpr int width = std::min(Vectors, fitting);
  tile_part<E, Begin, Rows, width>(a, a_stride, b, steps, out, ahead);
  if constexpr (width < Vectors) {
    tile<E, Begin, Rows, Vectors - width>(a, a_stride, b + width * kLanes, steps, out + width * kLanes, Ahead{});
  }
}

using TileFunction = void (*)(const uint32_t* a, ptrdiff_t a_stride, const uint32_t* b, int steps, float* out,
                              Ahead ahead);

template <class E, Sums Begin, int... Index>
constexpr TileFunction pick_tile(int index, std::integer_sequence<int, Index...>) {
  constexpr TileFunction all[] = {tile<E, Begin, Index / kPanelVectors + 1, Index % kPanelVectors + 1>...};
  return all[index];
}

// The kernel for `rows` in 1..6 and `vectors` in 1..4.
template <class E>
TileFunction tile_function(Sums begin, int rows, int vectors) {
  const int index = (rows - 1) * kPanelVectors + vectors - 1;
  constexpr auto all = std::make_integer_sequence<int, kTileRows * kPanelVectors>();
  return begin == Sums::kFresh ? pick_tile<E, Sums::kFresh>(index, all) : pick_tile<E, Sums::kContinued>(index, all);
}

// Calls work(first row, rows) for [begin, end) cut into tiles of nearly equal height.
template <class Work>
void each_tile(Range rows, Work&& work) {
  const int count = rows.end - rows.begin;
  const int tiles = (count + kTileRows - 1) / kTileRows;
  for (int t = 0; t < tiles; ++t) {
    const int begin = rows.begin + count * t / tiles;
    work(begin, rows.begin + count * (t + 1) / tiles - begin);
  }
}

// GEMM input: row r begins at values + r * stride.
template <class E>
struct Rows {
  const typename E::Store* values;
  ptrdiff_t stride;

  const uint32_t* words(int row) const { return as_words(values + row * stride); }
  ptrdiff_t word_stride() const { return stride / E::kPerWord; }
};

// A few rows with the column vectors [vectors.begin, vectors.end). The weights come from memory, in pieces that stay in
// the second-level cache for all tiles of rows. A single tile leaves fetching to the hardware, which is the fastest
// with one plain stream; several tiles share in fetching the next piece.
template <class E, class Finish>
void stream_columns(const Rows<E>& a, int rows, const Panels& b, Range vectors, const Finish& finish) {
  alignas(64) float sums[kStreamRows * kPanelColumns];
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  const int lines = tiles == 1 ? 0 : (kPanelVectors + tiles - 1) / tiles;
  for (int first = vectors.begin; first < vectors.end;) {
    const int panel = first / kPanelVectors;
    const int count = std::min(vectors.end, (panel + 1) * kPanelVectors) - first;
    const uint32_t* words = b.panel(panel) + first % kPanelVectors * kLanes;
    for (int step = 0; step < b.steps; step += kPieceSteps) {
      const int steps = std::min(kPieceSteps, b.steps - step);
      Ahead ahead{words + (step + steps) * kPanelColumns, lines};
      each_tile({0, rows}, [&](int row, int height) {
        const auto kernel = tile_function<E>(step == 0 ? Sums::kFresh : Sums::kContinued, height, count);
        kernel(a.words(row) + step, a.word_stride(), words + step * kPanelColumns, steps, sums + row * kPanelColumns,
               ahead);
        ahead.from += lines * kLanes;
      });
    }
    for (int i = 0; i < rows; ++i) finish(i, first * kLanes, count, sums + i * kPanelColumns);
    first += count;
  }
}

// The product of a block of rows with the column vectors [vectors.begin, vectors.end). finish(row, column, vectors,
// sums) takes each finished piece of a row.
template <class E, class Finish>
void multiply_block(const Rows<E>& a, Range rows, const Panels& b, Range vectors, const Finish& finish) {
  alignas(64) float sums[kTileRows * kPanelColumns];
  for (int first = vectors.begin; first < vectors.end;) {
    const int panel = first / kPanelVectors;
    const int last = std::min(vectors.end, (panel + 1) * kPanelVectors);
    const uint32_t* words = b.panel(panel) + first % kPanelVectors * kLanes;
    each_tile(rows, [&](int row, int count) {
      for (int i = 0; i < count; ++i) finish.prepare(row + i, first * kLanes);
      const auto kernel = tile_function<E>(Sums::kFresh, count, last - first);
      kernel(a.words(row), a.word_stride(), words, b.steps, sums, Ahead{});
      for (int i = 0; i < count; ++i) finish(row + i, first * kLanes, last - first, sums + i * kPanelColumns);
    });
    first = last;
  }
}

// The whole product, by all members; ends with a barrier. `grain` is the number of vectors that must stay together.
template <class E, class Finish>
void multiply(Member& me, const Rows<E>& a, int rows, const Panels& b, int grain, const Finish& finish) {
  if (rows <= kStreamRows) {
    stream_columns<E>(a, rows, b, me.share(b.vectors(), grain), finish);
    me.barrier();
    return;
  }
  const int blocks = (rows + kBlockRows - 1) / kBlockRows;
  me.each(blocks * panel_count(b.columns), [&](int task) {
    const int block = task % blocks;
    const int panel = task / blocks;
    const Range part = {rows * block / blocks, rows * (block + 1) / blocks};
    const Range vectors = {panel * kPanelVectors, std::min(b.vectors(), (panel + 1) * kPanelVectors)};
    multiply_block<E>(a, part, b, vectors, finish);
  });
}

// Finishers: what happens to a finished sum. prepare() asks for the memory before the sum is computed. `bias` may be
// null and is padded to whole panels.

inline void prefetch_panel(const float* p) {
  for (int i = 0; i < kPanelColumns; i += kLanes) __builtin_prefetch(p + i, 1);
}

inline F16 with_bias(const float* sums, const float* bias, int column) {
  const F16 sum = load(sums);
  return bias == nullptr ? sum : add(sum, load(bias + column));
}

// out[row][column] = sum + bias
struct StoreSums {
  float* out;
  ptrdiff_t stride;
  int columns;
  const float* bias;

  void prepare(int row, int column) const { prefetch_panel(out + row * stride + column); }

  void operator()(int row, int column, int vectors, const float* sums) const {
    for (int v = 0; v < vectors; ++v, column += kLanes, sums += kLanes) {
      float* to = out + row * stride + column;
      const F16 sum = with_bias(sums, bias, column);
      if (column + kLanes <= columns) {
        store(to, sum);
        continue;
      }
      float whole[kLanes];
      store(whole, sum);
      std::memcpy(to, whole, (columns - column) * sizeof(float));
    }
  }
};

// out[row][column] += sum + bias; columns are whole vectors
struct AddSums {
  float* out;
  ptrdiff_t stride;
  const float* bias;

  void prepare(int row, int column) const { prefetch_panel(out + row * stride + column); }

  void operator()(int row, int column, int vectors, const float* sums) const {
    for (int v = 0; v < vectors; ++v, column += kLanes, sums += kLanes) {
      float* to = out + row * stride + column;
      store(to, add(load(to), with_bias(sums, bias, column)));
    }
  }
};

// out[row][feature] = silu(gate) * up, for columns in GatedOrder
template <class E>
struct GateSums {
  typename E::Store* out;
  ptrdiff_t stride;
  const float* bias;

  void prepare(int row, int column) const { __builtin_prefetch(out + row * stride + column / 2, 1); }

  void operator()(int row, int column, int vectors, const float* sums) const {
    for (int v = 0; v < vectors; v += 2, column += 2 * kLanes, sums += 2 * kLanes) {
      const F16 gate = with_bias(sums, bias, column);
      const F16 up = with_bias(sums + kLanes, bias, column + kLanes);
      E::store(out + row * stride + column / 2, baton::multiply(silu(gate), up));
    }
  }
};

}  // namespace baton
