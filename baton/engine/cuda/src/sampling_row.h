// One row's logits as the sampler sees them: read in tiles, changed by penalties and biases, and weighed.
#pragma once

#include "sampling_group.h"

namespace baton::sampling {

constexpr int OCTET = 8;                         // neighbouring logits that a lane reads at once
constexpr int OCTETS = 4;                        // of a lane in one tile
constexpr int TILE = WARP * OCTET * OCTETS;      // neighbouring logits that a warp reads before it moves on
constexpr uint32_t IN_PROMPT = 0x80000000u;      // in a count: the token is in the prompt; the rest counts the output
constexpr float ONE = 8796093022208.0f;          // 2^43: the weight of the likeliest token
using Eight = float[OCTET];
constexpr float INFINITE = __builtin_huge_valf();

enum class Kind : int32_t { IDLE = 0, LIKELIEST = 1, DRAWN = 2, REFUSED = 3 };
enum Flag : int { SOUND = 0, NOT_FINITE = 1, TOO_MANY_EDITS = 2 };

// How to draw from one row. sampling_rows.py writes these bytes; ROW_DRAW there has the same fields.
struct RowDraw {
  uint64_t seed;
  double top_p;         // 1: off
  double min_p_drop;    // temperature * ln(min_p), how far below the largest logit one may be; -inf: off
  float inverse_high;   // inverse_high + inverse_low = 1 / temperature
  float inverse_low;
  float span;           // 31 * temperature: logits further below the largest weigh nothing, as e^-31 * 2^43 rounds to 0
  float repetition, presence, frequency;
  int32_t top_k;        // 0: off
  int32_t slot;         // row of counts and seen; -1: no penalties
  int32_t first_edit, edits;
  Kind kind;
  int32_t unused[3];
};
static_assert(sizeof(RowDraw) == 80);

// Added to a token's logit; -inf forbids it. A row's edits are sorted by token.
struct Edit {
  int32_t token;
  float bias;
};

// Orders floats as unsigned integers. Both zeros have one key.
__device__ __forceinline__ uint32_t key_of(float value) {
  const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

__device__ __forceinline__ float max_or_nan(const Eight &values) {
  return max_or_nan(max_or_nan(max_or_nan(values[0], values[1]), max_or_nan(values[2], values[3])),
                    max_or_nan(max_or_nan(values[4], values[5]), max_or_nan(values[6], values[7])));
}

// Philox 4x32, 10 rounds: 53 random bits for (seed, position), as in philox.py.
__device__ inline uint64_t random_bits(uint64_t seed, uint32_t position) {
  uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint32_t low_a = c0 * 0xD2511F53u, high_a = __umulhi(c0, 0xD2511F53u);
    const uint32_t low_b = c2 * 0xCD9E8D57u, high_b = __umulhi(c2, 0xCD9E8D57u);
    c0 = high_b ^ c1 ^ k0;
    c1 = low_b;
    c2 = high_a ^ c3 ^ k1;
    c3 = low_a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<uint64_t>(c0) << 21 | c1 >> 11;
}

// exp((value - largest) / temperature) in units of 2^-43, for finite values no more than `nowhere` below the largest.
// Every rounding is spelled out, so that a logit has the same weight wherever it is weighed; the low part of
// 1 / temperature keeps the error from growing with the distance.
struct Weigh {
  float largest, inverse_high, inverse_low;
  float nowhere;  // a distance at which the weight is 0

  __device__ __forceinline__ float distance(float value) const { return __fsub_rn(value, largest); }

  __device__ __forceinline__ uint64_t at(float distance) const {
    const float scaled = __fmul_rn(distance, inverse_high);
    const float lost = __fmaf_rn(distance, inverse_low, __fmaf_rn(distance, inverse_high, -scaled));
    const float weight = expf(scaled);
    return __float2ull_rn(__fmul_rn(__fmaf_rn(weight, lost, weight), ONE));
  }

  __device__ __forceinline__ uint64_t operator()(float value) const { return at(distance(value)); }
};

// What changes a row's logits before anything is drawn.
struct Edits {
  const unsigned char *marks;  // shared memory, a bit for each token that is changed
  const uint32_t *counts;      // [vocabulary] or null
  const Edit *list;
  int length;
  float repetition, presence, frequency;
};

__device__ __noinline__ float edited(const Edits &edits, int token, float value) {
  const uint32_t count = edits.counts == nullptr ? 0 : edits.counts[token];
  if (count != 0) {
    value = value > 0.0f ? __fdiv_rn(value, edits.repetition) : __fmul_rn(value, edits.repetition);
    const float times = static_cast<float>(count & ~IN_PROMPT);
    if (times > 0.0f) value = __fsub_rn(value, __fadd_rn(edits.presence, __fmul_rn(edits.frequency, times)));
  }
  int first = 0;
  for (int last = edits.length; first < last;) {
    const int middle = (first + last) / 2;
    if (edits.list[middle].token < token) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  for (; first < edits.length && edits.list[first].token == token; ++first) {
    value = __fadd_rn(value, edits.list[first].bias);
  }
  return value;
}

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ uint32_t bits_of(float value) { return __float_as_uint(value); }
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }

// Eight neighbouring logits as they lie in memory.
template <typename T>
struct Octet {
  static constexpr int WORDS = OCTET * sizeof(T) / sizeof(uint4);
  uint4 words[WORDS];

  __device__ __forceinline__ void load(const T *from) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = reinterpret_cast<const uint4 *>(from)[i];
  }

  // The first `count` of them; -inf for the others.
  __device__ __forceinline__ void load(const T *from, int count) {
    constexpr int IN_WORD = sizeof(uint32_t) / sizeof(T);
    uint32_t some[4 * WORDS] = {};
#pragma unroll
    for (int i = 0; i < OCTET; ++i) {
      const uint32_t bits = i < count ? bits_of(from[i]) : sizeof(T) == 4 ? 0xff800000u : 0xff80u;
      some[i / IN_WORD] |= bits << i % IN_WORD * 16;
    }
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = {some[4 * i], some[4 * i + 1], some[4 * i + 2], some[4 * i + 3]};
  }

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) return __uint_as_float(word(i));
    return __uint_as_float(i % 2 == 0 ? word(i / 2) << 16 : word(i / 2) & 0xffff0000u);
  }

 private:
  __device__ __forceinline__ uint32_t word(int i) const {
    const uint4 &four = words[i / 4];
    return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
  }
};

// A row of logits and its tiles, which the warps of the group take in turn.
template <typename T, bool EDITED>
struct Logits {
  static constexpr int LIGHT = EDITED || sizeof(T) == 4 ? 1 : 4;  // octets in flight, if little is done with them
  static constexpr int HEAVY = EDITED || sizeof(T) == 4 ? 1 : 2;

  const T *row;
  int vocabulary;
  bool aligned;  // octets are whole and begin at multiples of 16 bytes
  Edits edits;

  __device__ int tiles() const { return (vocabulary + TILE - 1) / TILE; }

  __device__ float at(int token) const {
    const float raw = widen(row[token]);
    if (!EDITED) return raw;
    return edits.marks[token / 8] >> token % 8 & 1 ? edited(edits, token, raw) : raw;
  }

  // Calls visit(first token, raw logits, logits) for this lane's octets of every tile of this warp, tokens ascending,
  // and finish(tile) in all lanes after each tile. Where octets are not whole, the last one is filled up with -inf.
  // IN_FLIGHT octets are read at once.
  template <int IN_FLIGHT = LIGHT, typename Visit, typename Finish>
  __device__ __forceinline__ void scan(const Group &group, Visit visit, Finish finish) const {
    for (int tile = group.warp(); tile < tiles(); tile += group.warps()) {
      const int first = tile * TILE + Group::lane() * OCTET;
#pragma unroll 1
      for (int i = 0; i < OCTETS; i += IN_FLIGHT) visit_octets<IN_FLIGHT>(first + i * WARP * OCTET, visit);
      finish(tile);
    }
  }

  template <int IN_FLIGHT = LIGHT, typename Visit>
  __device__ __forceinline__ void scan(const Group &group, Visit visit) const {
    scan<IN_FLIGHT>(group, visit, [](int) {});
  }

 private:
  template <int COUNT, typename Visit>
  __device__ __forceinline__ void visit_octets(int first, Visit &visit) const {
    constexpr int STEP = WARP * OCTET;
    Octet<T> octets[COUNT];
    if (aligned) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        if (first + i * STEP < vocabulary) octets[i].load(row + first + i * STEP);
      }
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) octets[i].load(row + first + i * STEP, vocabulary - first - i * STEP);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (first + i * STEP < vocabulary) visit_octet(octets[i], first + i * STEP, visit);
    }
  }

  template <typename Visit>
  __device__ __forceinline__ void visit_octet(const Octet<T> &octet, int first, Visit &visit) const {
    Eight raw;
#pragma unroll
    for (int i = 0; i < OCTET; ++i) raw[i] = octet[i];
    if constexpr (EDITED) {
      const unsigned marks = edits.marks[first / 8];
      Eight values;
#pragma unroll
      for (int i = 0; i < OCTET; ++i) values[i] = marks >> i & 1 ? edited(edits, first + i, raw[i]) : raw[i];
      visit(first, raw, values);
    } else {
      visit(first, raw, raw);
    }
  }
};

}  // namespace baton::sampling
