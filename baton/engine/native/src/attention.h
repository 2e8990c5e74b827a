// Causal attention over the paged KV cache.
//
// Positions are taken in tiles of 64 that begin at multiples of 64, whatever the chunk or the batch, and a row's
// running maximum, sum and output are updated tile by tile. A tile that a row does not see changes nothing for it. So
// a row's result depends on its own query and cache only.
#pragma once

#include <limits>

#include "kv_tile.h"

namespace baton {

// Query rows (tokens times heads of a group) that share one pass over the cache.
constexpr int kQueryRows = 96;

// Query rows of one sequence and one KV head. Row m is token m / group; queries and outputs are as the members say.
template <class E>
struct Queries {
  using Store = typename E::Store;
  const Store* values;  // [tokens * group, head_dim]
  int tokens;
  int group;
  int first_position;  // of token 0
  int window;          // positions a token sees, itself included
  float scale;         // of a score, times log2(e): weights are powers of two
  Store* out;  // token t, head g of the group: out + t * out_stride + g * head_dim
  ptrdiff_t out_stride;

  int rows() const { return tokens * group; }
  int position(int row) const { return first_position + row / group; }
  int oldest() const { return std::max(0, first_position - window + 1); }
};

// One member's working memory.
template <class E>
struct AttentionScratch {
  using Store = typename E::Store;
  AttentionScratch() = default;
  AttentionScratch(Arena& arena, int head_dim, int rows)
      : keys(arena.take<uint32_t>(head_dim / E::kPerWord * kTilePositions)),
        values(arena.take<uint32_t>(kTilePositions / E::kPerWord * padded_columns(head_dim))),
        sums(arena.take<float>(static_cast<size_t>(rows) * padded_columns(head_dim))),
        totals(arena.take<float>(static_cast<size_t>(rows) * kLanes)),
        maxima(arena.take<float>(rows)),
        zeros(arena.take<Store>(head_dim)) {}

  static size_t bytes(int head_dim, int rows) {
    return (2 * kTilePositions + rows) * padded_columns(head_dim) * sizeof(float) +
           rows * (kLanes + 1) * sizeof(float) + head_dim * sizeof(float) + 6 * 64;
  }

  uint32_t* keys = nullptr;    // [head_dim words][64 positions]
  uint32_t* values = nullptr;  // panels of [64 positions in words][64 columns]
  float* sums = nullptr;       // panels of [rows][64 columns]
  float* totals = nullptr;     // [rows][16 partial sums]
  float* maxima = nullptr;     // [rows]
  Store* zeros = nullptr;      // [head_dim], stands for positions outside
};

// Turns one row's scores of a tile into weights, and rescales what the row has gathered so far. Lanes outside
// [begin, end) are invisible; their scores may be anything.
template <class E>
void weigh(const Queries<E>& queries, const AttentionScratch<E>& scratch, int row, int begin, int end, int panels,
           const float* scores, typename E::Store* weights) {
  if (end <= begin) {
    for (int v = 0; v < kPanelVectors; ++v) E::store(weights + v * kLanes, zero());
    return;
  }
  const F16 hidden = splat(-std::numeric_limits<float>::infinity());
  F16 score[kPanelVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kPanelVectors; ++v) {
    score[v] = load(scores + v * kLanes);
    if (begin > 0 || end < kTilePositions) score[v] = keep_lanes(score[v], begin - v * kLanes, end - v * kLanes, hidden);
  }
  const float before = scratch.maxima[row];
  const float here = lane_maximum(maximum(maximum(score[0], score[1]), maximum(score[2], score[3])));
  const float now = std::max(before, here);
  const F16 scale = splat(queries.scale);
  const F16 shift = splat(-now * queries.scale);
#pragma GCC unroll 4
  for (int v = 0; v < kPanelVectors; ++v) {
    score[v] = exp2_downward(multiply_add(score[v], scale, shift));
    E::store(weights + v * kLanes, score[v]);
  }
  float* total = scratch.totals + row * kLanes;
  const F16 sum = add(add(score[0], score[1]), add(score[2], score[3]));
  if (now == before) {
    store(total, add(load(total), sum));
    return;
  }
  const F16 shrink = exp2_downward(splat((before - now) * queries.scale));
  scratch.maxima[row] = now;
  store(total, add(multiply(load(total), shrink), sum));
  for (int p = 0; p < panels; ++p) {
    float* sums = scratch.sums + (static_cast<size_t>(p) * queries.rows() + row) * kPanelColumns;
    for (int c = 0; c < kPanelColumns; c += kLanes) store(sums + c, multiply(load(sums + c), shrink));
  }
}

// A tile of a product that fetches a part of the next KV tile every quarter of its way, while there is something to
// fetch. `a` has rows of `a_stride` words.
template <class E>
void multiply_fetching(Sums begin, int rows, int vectors, const uint32_t* a, ptrdiff_t a_stride, const uint32_t* b,
                       int steps, float* out, TileFetch<E>& fetch) {
  const int piece = fetch.done() ? steps : (steps + 3) / 4;
  for (int s = 0; s < steps; s += piece) {
    const auto kernel = tile_function<E>(s == 0 ? begin : Sums::kContinued, rows, vectors);
    kernel(a + s, a_stride, b + s * kPanelColumns, std::min(piece, steps - s), out, Ahead{});
    fetch.part();
  }
}

// One tile of positions for `count` query rows from `first` on.
template <class E>
void attend_tile(const Queries<E>& queries, const AttentionScratch<E>& scratch, int head_dim, int tile, int first,
                 int count, TileFetch<E>& fetch) {
  const int visible = std::min(kTilePositions, queries.position(first + count - 1) + 1 - tile);
  if (visible <= 0) return;
  if (queries.position(first) - queries.window >= tile + kTilePositions - 1) return;
  const int depth = head_dim / E::kPerWord;
  alignas(64) float scores[kTileRows * kPanelColumns];
  alignas(64) typename E::Store weights[kTileRows * kTilePositions];
  const uint32_t* words = as_words(queries.values) + static_cast<ptrdiff_t>(first) * depth;
  multiply_fetching<E>(Sums::kFresh, count, (visible + kLanes - 1) / kLanes, words, depth, scratch.keys, depth, scores,
                       fetch);
  const int panels = panel_count(head_dim);
  for (int i = 0; i < count; ++i) {
    const int end = queries.position(first + i) + 1 - tile;
    const int begin = end - queries.window;
    weigh<E>(queries, scratch, first + i, std::max(begin, 0), std::min(end, kTilePositions), panels,
             scores + i * kPanelColumns, weights + i * kTilePositions);
  }
  // Weights past the visible positions are zero, so leaving them out changes no sum.
  constexpr int tile_steps = kTilePositions / E::kPerWord;
  const int steps = (visible + E::kPerWord - 1) / E::kPerWord;
  for (int p = 0; p < panels; ++p) {
    float* sums = scratch.sums + (static_cast<size_t>(p) * queries.rows() + first) * kPanelColumns;
    multiply_fetching<E>(Sums::kContinued, count, vectors_of_panel(head_dim, p), as_words(weights), tile_steps,
                         scratch.values + p * tile_steps * kPanelColumns, steps, sums, fetch);
  }
}

// Attention of all query rows over the cache; the keys and values of their own positions must be there already.
// `following` is what this member will probably read afterwards.
template <class E>
void attend(const Queries<E>& queries, const CacheView<E>& cache, const View<E>& following,
            const AttentionScratch<E>& scratch) {
  const int rows = queries.rows();
  const int head_dim = cache.head_dim;
  const int panels = panel_count(head_dim);
  const View<E> view = {cache, queries.oldest(), queries.first_position + queries.tokens};
  std::memset(scratch.sums, 0, static_cast<size_t>(rows) * panels * kPanelColumns * sizeof(float));
  std::memset(scratch.totals, 0, static_cast<size_t>(rows) * kLanes * sizeof(float));
  std::fill(scratch.maxima, scratch.maxima + rows, -std::numeric_limits<float>::infinity());
  TileRows<E> places[2];
  view.locate(view.first_tile(), scratch.zeros, places[0]);
  for (int tile = view.first_tile(), i = 0; tile < view.end; tile += kTilePositions, i ^= 1) {
    const int next = tile + kTilePositions;
    if (next < view.end) {
      view.locate(next, scratch.zeros, places[i ^ 1]);
    } else {
      following.locate(following.first_tile(), scratch.zeros, places[i ^ 1]);
    }
    TileFetch<E> fetch(places[i ^ 1], head_dim);
    load_keys<E>(places[i], head_dim, scratch.keys, fetch);
    load_values<E>(places[i], head_dim, scratch.values, fetch);
    each_tile({0, rows}, [&](int first, int count) {
      attend_tile<E>(queries, scratch, head_dim, tile, first, count, fetch);
    });
  }
  for (int row = 0; row < rows; ++row) {
    const F16 share = splat(1.0f / lane_sum(load(scratch.totals + row * kLanes)));
    typename E::Store* out = queries.out + row / queries.group * queries.out_stride + row % queries.group * head_dim;
    for (int c = 0; c < head_dim; c += kLanes) {
      const float* sums = scratch.sums + (static_cast<size_t>(c / kPanelColumns) * rows + row) * kPanelColumns;
      E::store(out + c, multiply(load(sums + c % kPanelColumns), share));
    }
  }
}

}  // namespace baton
