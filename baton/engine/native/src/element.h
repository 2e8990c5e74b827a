// The two element types of weights, GEMM inputs and the KV cache. Everything between GEMMs is float32.
#pragma once

#include "simd.h"

namespace baton {

// A *word* is 32 bits along the reduced dimension: one float32, or two bfloat16. Kernels consume one word per step.
struct Float32 {
  using Store = float;
  static constexpr int kPerWord = 1;

  static float widen(Store x) { return x; }
  static F16 load(const Store* p) { return baton::load(p); }
  static void store(Store* p, F16 x) { baton::store(p, x); }
  static F16 dot(F16 sum, W16 a, W16 b) { return multiply_add(as_floats(a), as_floats(b), sum); }
  // Sixteen words whose values along the reduced dimension come from consecutive rows.
  static W16 join_rows(const Store* const* rows, int column) {
    return load_words(reinterpret_cast<const uint32_t*>(rows[0] + column));
  }
};

struct BFloat16 {
  using Store = uint16_t;
  static constexpr int kPerWord = 2;

  static float widen(Store x) { return baton::widen(x); }
  static F16 load(const Store* p) { return load_bf16(p); }
  static void store(Store* p, F16 x) { store_bf16(p, x); }
  static F16 dot(F16 sum, W16 a, W16 b) { return dot_bf16(sum, a, b); }
  static W16 join_rows(const Store* const* rows, int column) {
    return interleave_bf16(rows[0] + column, rows[1] + column);
  }
};

template <class Store>
inline const uint32_t* as_words(const Store* p) {
  return reinterpret_cast<const uint32_t*>(p);
}

}  // namespace baton
