// Working memory of a step. It only grows, so a step of a size seen before allocates nothing.
#pragma once

#include <vector>

#include "abi.h"
#include "attention.h"

namespace baton {

// Rows up to this many are normalised by every member for itself, which is cheaper than a barrier.
constexpr int kPrivateRows = 4;

template <class E>
struct Scratch {
  using Store = typename E::Store;

  float* x = nullptr;         // [rows, hidden] the residual stream
  Store* normed = nullptr;    // [rows, hidden]
  float* qkv = nullptr;       // [rows, q + 2 kv]
  Store* queries = nullptr;   // [kv_heads, rows, group, head_dim]
  Store* attended = nullptr;  // [rows, q]
  Store* gated = nullptr;     // [slots, ffn]
  float* cosines = nullptr;   // [rows, head_dim / 2]
  float* sines = nullptr;     // [rows, head_dim / 2]
  float* router = nullptr;    // [rows, experts]
  Store* routed = nullptr;    // [slots, hidden] rows in expert order
  float* expert_out = nullptr;  // [slots, hidden]
  int* slot_rows = nullptr;     // [slots] the row of each slot
  int* row_slots = nullptr;     // [rows, top_k] the slots of each row, by ascending expert
  int* chosen = nullptr;        // [rows, top_k] experts, ascending
  float* shares = nullptr;      // [rows, top_k] their weights
  int* expert_starts = nullptr; // [experts + 1]
  std::vector<Store*> private_rows;  // per member [kPrivateRows, hidden]
  std::vector<AttentionScratch<E>> attention;

  void reserve(const BatonShape& shape, int threads, int rows) {
    if (rows <= capacity_) return;
    capacity_ = static_cast<int>(round_up(rows, 64));
    const size_t n = capacity_;
    const int q = shape.heads * shape.head_dim;
    const int qkv_columns = q + 2 * shape.kv_heads * shape.head_dim;
    const size_t slots = shape.experts > 0 ? n * shape.top_k : n;
    const int ffn = shape.experts > 0 ? shape.expert_ffn : shape.ffn;
    const int query_rows = std::max(kQueryRows, shape.heads / shape.kv_heads);
    const size_t attention_bytes = AttentionScratch<E>::bytes(shape.head_dim, query_rows);
    const size_t row_bytes = sizeof(float) * (3 * shape.hidden + qkv_columns + 2 * q + shape.head_dim + shape.experts) +
                             sizeof(float) * 3 * shape.top_k;
    const size_t slot_bytes = sizeof(float) * (2 * shape.hidden + ffn + 1);
    const size_t member_bytes = attention_bytes + sizeof(float) * kPrivateRows * shape.hidden + 64;
    arena_ = Arena();  // the old memory goes before the new comes
    arena_ = Arena(n * row_bytes + slots * slot_bytes + threads * member_bytes + (shape.experts + 1) * 4 + 64 * 32);
    x = arena_.template take<float>(n * shape.hidden);
    normed = arena_.template take<Store>(n * shape.hidden);
    qkv = arena_.template take<float>(n * qkv_columns);
    queries = arena_.template take<Store>(n * q);
    attended = arena_.template take<Store>(n * q);
    gated = arena_.template take<Store>(slots * ffn);
    cosines = arena_.template take<float>(n * shape.head_dim / 2);
    sines = arena_.template take<float>(n * shape.head_dim / 2);
    if (shape.experts > 0) take_routing(shape, n, slots);
    private_rows.clear();
    attention.clear();
    for (int i = 0; i < threads; ++i) {
      private_rows.push_back(arena_.template take<Store>(static_cast<size_t>(kPrivateRows) * shape.hidden));
      attention.emplace_back(arena_, shape.head_dim, query_rows);
    }
  }

 private:
  void take_routing(const BatonShape& shape, size_t rows, size_t slots) {
    router = arena_.template take<float>(rows * shape.experts);
    routed = arena_.template take<Store>(slots * shape.hidden);
    expert_out = arena_.template take<float>(slots * shape.hidden);
    slot_rows = arena_.template take<int>(slots);
    row_slots = arena_.template take<int>(slots);
    chosen = arena_.template take<int>(slots);
    shares = arena_.template take<float>(slots);
    expert_starts = arena_.template take<int>(shape.experts + 1);
  }

  Arena arena_;
  int capacity_ = 0;
};

}  // namespace baton
