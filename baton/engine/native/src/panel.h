// Weight matrices in the layout the kernels stream: panels of 64 output columns, one word of depth after the other.
#pragma once

#include "element.h"
#include "memory.h"
#include "threads.h"

namespace baton {

constexpr int kPanelVectors = 4;
constexpr int kPanelColumns = kPanelVectors * kLanes;

inline int panel_count(int columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }
inline int padded_columns(int columns) { return panel_count(columns) * kPanelColumns; }

// word(panel p, step s, column c) = words[(p * steps + s) * 64 + c]; columns past the last are zero.
struct Panels {
  uint32_t* words = nullptr;
  int columns = 0;
  int steps = 0;

  const uint32_t* panel(int index) const { return words + static_cast<size_t>(index) * steps * kPanelColumns; }
  int vectors() const { return (columns + kLanes - 1) / kLanes; }
};

template <class E>
size_t panel_bytes(int columns, int depth) {
  return static_cast<size_t>(padded_columns(columns)) * (depth / E::kPerWord) * sizeof(uint32_t);
}

// Which row of the source matrix becomes which packed column.
struct PlainOrder {
  int operator()(int column) const { return column; }
};

// Sixteen gate rows, then the sixteen up rows of the same features, and so on: a kernel that has finished both can
// apply silu(gate) * up without going through memory.
struct GatedOrder {
  int ffn;
  int operator()(int column) const {
    const int feature = column / (2 * kLanes) * kLanes + column % kLanes;
    return column / kLanes % 2 == 0 ? feature : ffn + feature;
  }
};

// Packs a row-major [columns, depth] matrix (torch.nn.Linear's layout).
template <class E, class Order>
Panels pack(Team& team, Arena& arena, const void* source, int columns, int depth, Order order) {
  Panels packed;
  packed.columns = columns;
  packed.steps = depth / E::kPerWord;
  packed.words = arena.take<uint32_t>(static_cast<size_t>(padded_columns(columns)) * packed.steps);
  const uint32_t* rows = static_cast<const uint32_t*>(source);
  team.run([&](Member& me) {
    me.each(panel_count(columns), [&](int panel) {
      uint32_t* to = packed.words + static_cast<size_t>(panel) * packed.steps * kPanelColumns;
      const int width = std::min(kPanelColumns, columns - panel * kPanelColumns);
      for (int c = 0; c < width; ++c) {
        const uint32_t* from = rows + static_cast<size_t>(order(panel * kPanelColumns + c)) * packed.steps;
        for (int s = 0; s < packed.steps; ++s) to[static_cast<size_t>(s) * kPanelColumns + c] = from[s];
      }
    });
  });
  return packed;
}

// Reads one row of the source matrix back, widened: out[depth].
template <class E>
void unpack_row(const Panels& packed, int row, float* out) {
  const uint32_t* words = packed.panel(row / kPanelColumns) + row % kPanelColumns;
  for (int s = 0; s < packed.steps; ++s) {
    typename E::Store values[E::kPerWord];
    std::memcpy(values, words + static_cast<size_t>(s) * kPanelColumns, sizeof values);
    for (int i = 0; i < E::kPerWord; ++i) out[s * E::kPerWord + i] = E::widen(values[i]);
  }
}

}  // namespace baton
