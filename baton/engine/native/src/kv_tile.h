// Tiles of the paged KV cache: finding them, fetching them, bringing them into kernel layout.
#pragma once

#include "gemm.h"

namespace baton {

constexpr int kTilePositions = kPanelColumns;

// The keys and values of one layer and one KV head: row(position) is [head_dim].
template <class E>
struct CacheView {
  using Store = typename E::Store;
  Store* keys;             // block 0's first key
  ptrdiff_t value_offset;  // from a key to the value of the same position
  ptrdiff_t block_stride;
  int block_size;
  int head_dim;
  const int32_t* table;

  Store* key(int position) const {
    const ptrdiff_t block = table[position / block_size];
    return keys + block * block_stride + static_cast<ptrdiff_t>(position % block_size) * head_dim;
  }
};

// Where the keys and then the values of a tile's positions are.
template <class E>
struct TileRows {
  const typename E::Store* rows[2 * kTilePositions];

  const typename E::Store* const* keys() const { return rows; }
  const typename E::Store* const* values() const { return rows + kTilePositions; }
};

// The part of a cache that a task reads: positions [begin, end). The others are zeros to it.
template <class E>
struct View {
  CacheView<E> cache;
  int begin;
  int end;

  int first_tile() const { return begin / kTilePositions * kTilePositions; }

  void locate(int tile, const typename E::Store* zeros, TileRows<E>& out) const {
    for (int j = 0; j < kTilePositions; ++j) {
      const bool inside = tile + j >= begin && tile + j < end;
      const typename E::Store* key = inside ? cache.key(tile + j) : zeros;
      out.rows[j] = key;
      out.rows[kTilePositions + j] = inside ? key + cache.value_offset : zeros;
    }
  }
};

// Fetches a tile part by part between pieces of work on another: all requests at once would fill the queues of the
// memory and stop the thread.
template <class E>
class TileFetch {
 public:
  static constexpr int kParts = 16;

  TileFetch(const TileRows<E>& tile, int head_dim) : tile_(tile), row_bytes_(head_dim * sizeof(typename E::Store)) {}

  bool done() const { return next_ == 2 * kTilePositions; }

  void part() {
    if (done()) return;
    for (int i = 0; i < 2 * kTilePositions / kParts; ++i) {
      const char* row = reinterpret_cast<const char*>(tile_.rows[next_++]);
      for (size_t byte = 0; byte < row_bytes_; byte += 64) prefetch(row + byte);
    }
  }

 private:
  const TileRows<E>& tile_;
  size_t row_bytes_;
  int next_ = 0;
};

inline int vectors_of_panel(int head_dim, int panel) {
  return std::min(kPanelVectors, head_dim / kLanes - panel * kPanelVectors);
}

// to[word of the head][position]: scores are products with the keys as columns.
template <class E>
void load_keys(const TileRows<E>& tile, int head_dim, uint32_t* to, TileFetch<E>& fetch) {
  for (int j = 0; j < kTilePositions; j += kLanes) {
    for (int s = 0; s < head_dim / E::kPerWord; s += kLanes) {
      const uint32_t* words[kLanes];
      for (int i = 0; i < kLanes; ++i) words[i] = as_words(tile.keys()[j + i]) + s;
      transpose_words(words, to + s * kTilePositions + j, kTilePositions);
    }
    fetch.part();
  }
}

// Panels of [word of positions][64 columns]: outputs are products with the values' features as columns.
template <class E>
void load_values(const TileRows<E>& tile, int head_dim, uint32_t* to, TileFetch<E>& fetch) {
  constexpr int steps = kTilePositions / E::kPerWord;
  for (int p = 0; p < panel_count(head_dim); ++p) {
    const int vectors = vectors_of_panel(head_dim, p);
    for (int s = 0; s < steps; ++s, to += kPanelColumns) {
      for (int v = 0; v < vectors; ++v) {
        const int column = p * kPanelColumns + v * kLanes;
        store_words(to + v * kLanes, E::join_rows(tile.values() + s * E::kPerWord, column));
      }
      if (p == 0 && s % (steps / 4) == 0) fetch.part();
    }
  }
}

}  // namespace baton
