// Finds the smallest logit that top-k and top-p keep, by counting and weighing, without sorting.
//
// One pass counts the logits of each of many narrow buckets below the largest; the threshold's bucket and its
// neighbours are then listed, some two thousand candidates at most, with the exact weight of all that lies above them,
// and the threshold is found bit by bit in the list. The buckets only say where to look: the result is exact, and all
// blocks of the group find the same. Only a bucket too full to be listed costs further passes over the row.
#pragma once

#include "sampling_row.h"

namespace baton::sampling {

constexpr int BUCKETS = 2048;
constexpr int CANDIDATES = 2048;  // that can be listed
constexpr int MARGIN = 256;       // candidates on either side of where top-p probably cuts
constexpr int BUCKETS_PER_THREAD = BUCKETS / THREADS;

struct FilterMemory {
  uint32_t listed;                 // by this block
  uint32_t own_list[CANDIDATES];   // of this block, as keys
  uint32_t up_to[BUCKETS];         // logits of the row in this bucket and those above
  union {
    uint32_t histogram[BUCKETS + 1];  // of this block, the rest last; not read once the first list is made
    uint32_t list[CANDIDATES];     // of all blocks
  };
  int crossing;
};

// Neighbouring buckets.
struct Window {
  int first, last;
};

// Of the logits above a window, and of all.
struct Weights {
  uint64_t above, total;
  __device__ Weights operator+(const Weights &other) const { return {above + other.above, total + other.total}; }
};

// The bits that are set in some key, and those that are clear in some key.
struct KeyBits {
  uint32_t set, clear;
};

struct Union {
  __device__ KeyBits operator()(const KeyBits &a, const KeyBits &b) const {
    return {a.set | b.set, a.clear | b.clear};
  }
};

enum class Measure { COUNT, WEIGHT };

template <typename Row>
class Filter {
 public:
  // `lowest` is at most the smallest logit.
  __device__ Filter(Group &group, FilterMemory &memory, const Row &row, const Weigh &weigh, float lowest, float span)
      : group_(group), memory_(memory), row_(row), weigh_(weigh) {
    const float range = fminf(__fsub_rn(weigh.largest, lowest), span);
    scale_ = range > 0.0f ? fminf(__fdiv_rn(BUCKETS - 0.5f, range), 3e38f) : 0.0f;
    count_buckets();
  }

  // The smallest logit kept by top-k, then top-p; -infinity: all are. Ties with the last one kept stay in.
  __device__ float threshold(int top_k, double top_p) {
    float floor = -INFINITE;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {  // a loop, so that there is one copy of the code
      const Measure measure = turn == 0 ? Measure::COUNT : Measure::WEIGHT;
      const bool cuts = turn == 0 ? top_k > 0 && static_cast<uint32_t>(top_k) < up_to(BUCKETS - 1) : top_p < 1.0;
      if (cuts) floor = cut(measure, floor, top_k, top_p);
    }
    return floor;
  }

 private:
  // ------------------------------------------------------------------------------------------------------- buckets

  // 0 for the largest logit, rising as logits fall; BUCKETS or more, or NaN, for those without weight. What is before
  // the point is the bucket.
  __device__ __forceinline__ float depth(float distance) const { return __fmul_rn(-distance, scale_); }

  __device__ uint32_t up_to(int bucket) const { return bucket < 0 ? 0 : memory_.up_to[bucket]; }

  __device__ void count_buckets() {
    for (int i = threadIdx.x; i <= BUCKETS; i += THREADS) memory_.histogram[i] = 0;
    __syncthreads();
    row_.scan(group_, [this](int, const Eight &, const Eight &values) {
#pragma unroll
      for (int i = 0; i < OCTET; ++i) {
        const float at = fminf(depth(weigh_.distance(values[i])), BUCKETS);  // not NaN either
        atomicAdd(&memory_.histogram[static_cast<int>(at)], 1u);
      }
    });
    group_.sync();
    const int first = threadIdx.x * BUCKETS_PER_THREAD;
    uint32_t counts[BUCKETS_PER_THREAD] = {};
    for (int rank = 0; rank < group_.size(); ++rank) {
      const uint32_t *histogram = group_.peer(&memory_.histogram[first], rank);
#pragma unroll
      for (int i = 0; i < BUCKETS_PER_THREAD; ++i) counts[i] += histogram[i];
    }
#pragma unroll
    for (int i = 1; i < BUCKETS_PER_THREAD; ++i) counts[i] += counts[i - 1];
    const uint32_t own = counts[BUCKETS_PER_THREAD - 1];
    const uint32_t before = group_.scan_block(own) - own;
#pragma unroll
    for (int i = 0; i < BUCKETS_PER_THREAD; ++i) memory_.up_to[first + i] = before + counts[i];
    __syncthreads();
  }

  // The first bucket that, with those above it, holds at least `count` logits.
  __device__ int bucket_reaching(uint32_t count) const {
    int first = 0;
    for (int last = BUCKETS - 1; first < last;) {
      const int middle = (first + last) / 2;
      if (up_to(middle) < count) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first;
  }

  // About where the weight from the top reaches `share` of that of the buckets to `last`: each logit counts as if it
  // lay in the middle of its bucket.
  __device__ int bucket_near(double share, int last) {
    const int first = threadIdx.x * BUCKETS_PER_THREAD;
    const float width = scale_ > 0.0f ? __fdiv_rn(weigh_.inverse_high, scale_) : 0.0f;
    float weights[BUCKETS_PER_THREAD];
    float own = 0.0f;
    for (int i = 0; i < BUCKETS_PER_THREAD; ++i) {
      const int bucket = first + i;
      const uint32_t count = bucket <= last ? up_to(bucket) - up_to(bucket - 1) : 0;
      weights[i] = count == 0 ? 0.0f : static_cast<float>(count) * expf(-width * (bucket + 0.5f));
      own += weights[i];
    }
    const float reached = group_.scan_block(own);
    const float whole = group_.reduce_block(own, Sum{});
    const float wanted = static_cast<float>(share) * whole;
    if (threadIdx.x == 0) memory_.crossing = last;
    __syncthreads();
    if (reached >= wanted) {
      float sum = reached - own;
      int i = 0;
      for (; i < BUCKETS_PER_THREAD - 1; ++i) {
        sum += weights[i];
        if (sum >= wanted) break;
      }
      atomicMin(&memory_.crossing, first + i);
    }
    __syncthreads();
    return memory_.crossing;
  }

  // The window that ends with `last` and begins as high as the list has room for.
  __device__ Window window_to(int last) const {
    const uint32_t count = up_to(last);
    const int first = count <= CANDIDATES ? 0 : bucket_reaching(count - CANDIDATES) + 1;
    return {min(first, last), last};
  }

  // The window that begins with `first` and ends as low as the list has room for.
  __device__ Window window_from(int first) const {
    const uint32_t room = up_to(first - 1) + CANDIDATES;
    int last = bucket_reaching(room + 1);
    if (up_to(last) > room) --last;
    return {first, max(first, last)};
  }

  __device__ bool is_listable(const Window &window) const {
    return up_to(window.last) - up_to(window.first - 1) <= CANDIDATES;
  }

  // --------------------------------------------------------------------------------------------------------- passes

  // The weights of the logits of at least `floor`; those inside the window are listed, if they fit.
  __device__ Weights collect(const Window &window, float floor) {
    const bool listable = is_listable(window);
    const float first = window.first, end = window.last + 1;
    if (threadIdx.x == 0) memory_.listed = 0;
    __syncthreads();
    Weights weights{};
    row_.template scan<Row::HEAVY>(group_, [&](int, const Eight &, const Eight &values) {
      unsigned inside = 0;
#pragma unroll
      for (int i = 0; i < OCTET; ++i) {
        const float distance = weigh_.distance(values[i]);
        const float at = depth(distance);
        const bool counts = at < BUCKETS && values[i] >= floor;
        const uint64_t weight = weigh_.at(counts ? distance : weigh_.nowhere);  // no branch: eight are weighed at once
        weights.total += weight;
        weights.above += at < first ? weight : 0;
        inside |= counts && at >= first && at < end ? 1u << i : 0u;
      }
      if (listable && inside != 0) list(values, inside);
    });
    weights = group_.reduce(weights, Sum{});
    is_listed_ = listable;
    if (listable) merge_lists();
    return weights;
  }

  __device__ __forceinline__ void list(const Eight &values, unsigned inside) {
    uint32_t *to = &memory_.own_list[atomicAdd(&memory_.listed, static_cast<uint32_t>(__popc(inside)))];
#pragma unroll
    for (int i = 0; i < OCTET; ++i) {
      if (inside >> i & 1) *to++ = key_of(values[i]);
    }
  }

  // Called behind a reduction, so all blocks have made their lists. Each warp copies from one block.
  __device__ void merge_lists() {
    const int lane = Group::lane(), warp = threadIdx.x / WARP, size = group_.size();
    const uint32_t listed = lane < size ? *group_.peer(&memory_.listed, lane) : 0;
    const uint32_t reached = scan_lanes(listed);
    const int rank = warp % size;
    const uint32_t count = __shfl_sync(~0u, listed, rank);
    const uint32_t start = __shfl_sync(~0u, reached, rank) - count;
    const uint32_t *from = group_.peer(&memory_.own_list[0], rank);
    for (uint32_t i = warp / size * WARP + lane; i < count; i += THREADS / size) memory_.list[start + i] = from[i];
    length_ = __shfl_sync(~0u, reached, WARP - 1);
    group_.sync();
  }

  // The largest logit of at least `floor` at which those not below it are `top_k`, or weigh `top_p` of all from
  // `floor`.
  __device__ float cut(Measure measure, float floor, int top_k, double top_p) {
    const bool counts = measure == Measure::COUNT;
    Window window = counts ? window_to(bucket_reaching(top_k)) : nucleus_window(floor, top_p);
    for (;;) {
      const Weights weights =
          all_listed_ ? Weights{0, measured(Measure::WEIGHT, window, floor)} : collect(window, floor);
      const uint64_t above = counts ? up_to(window.first - 1) : weights.above;
      const uint64_t wanted = counts ? top_k : share_of(weights.total, top_p);
      if (wanted <= above) {
        window = window_to(window.first - 1);
      } else if (wanted > above + measured(measure, window, floor)) {
        window = window_from(window.last + 1);
      } else {
        all_listed_ = is_listed_ && window.first == 0;
        return descend(measure, window, floor, wanted - above);
      }
    }
  }

  // Where the nucleus probably ends: few candidates, as listing is not free, but a bucket on either side in any case.
  __device__ Window nucleus_window(float floor, double top_p) {
    if (all_listed_) return {0, 0};
    const float lowest = depth(weigh_.distance(floor));
    const int end = lowest < BUCKETS ? static_cast<int>(lowest) : BUCKETS - 1;
    const int near = bucket_near(top_p, end);
    const uint32_t above = up_to(near - 1), below = up_to(near) + MARGIN;
    const int first = above <= MARGIN ? 0 : min(bucket_reaching(above - MARGIN), max(near - 1, 0));
    const int last = up_to(end) <= below ? end : max(bucket_reaching(below), near + 1);
    const Window window{first, min(last, end)};
    return is_listable(window) ? window : window_to(near);
  }

  // The smallest whole weight that is at least `share` of `total`.
  __device__ static uint64_t share_of(uint64_t total, double share) {
    const uint64_t wanted = __double2ull_ru(share * __ull2double_rn(total));
    return min(max(wanted, uint64_t{1}), total);
  }

  // ---------------------------------------------------------------------------------------------------- thresholds

  // The largest logit of the window, at least `floor`, at which those of the window not below it measure `wanted` or
  // more. Decides the bits in which the window's keys differ, from the highest.
  __device__ float descend(Measure measure, const Window &window, float floor, uint64_t wanted) {
    const KeyBits bits = is_listed_ ? list_bits() : row_bits(window);
    uint32_t key = ~bits.clear;
    for (uint32_t open = bits.set & bits.clear; open != 0;) {
      const uint32_t bit = 0x80000000u >> __clz(open);
      open ^= bit;
      if (measured(measure, window, fmaxf(value_of(key | bit), floor)) >= wanted) key |= bit;
    }
    return value_of(key);
  }

  // How many logits of the window are at least `lowest`, or what they weigh.
  __device__ uint64_t measured(Measure measure, const Window &window, float lowest) {
    return is_listed_ ? measure_list(measure, key_of(lowest)) : measure_row(measure, window, lowest);
  }

  __device__ KeyBits list_bits() {
    KeyBits bits{0, 0};
    for (uint32_t i = threadIdx.x; i < length_; i += THREADS) {
      bits.set |= memory_.list[i];
      bits.clear |= ~memory_.list[i];
    }
    return group_.reduce_block(bits, Union{});
  }

  __device__ uint64_t measure_list(Measure measure, uint32_t lowest) {
    uint64_t sum = 0;
    for (uint32_t i = threadIdx.x; i < length_; i += THREADS) {
      const uint32_t key = memory_.list[i];
      if (key >= lowest) sum += measure == Measure::COUNT ? 1 : weigh_(value_of(key));
    }
    return group_.reduce_block(sum, Sum{});
  }

  __device__ __forceinline__ bool is_inside(const Window &window, float value) const {
    const float at = depth(weigh_.distance(value));
    return at >= window.first && at < window.last + 1;
  }

  __device__ KeyBits row_bits(const Window &window) {
    KeyBits bits{0, 0};
    row_.template scan<1>(group_, [&](int, const Eight &, const Eight &values) {
#pragma unroll
      for (int i = 0; i < OCTET; ++i) {
        if (!is_inside(window, values[i])) continue;
        bits.set |= key_of(values[i]);
        bits.clear |= ~key_of(values[i]);
      }
    });
    return group_.reduce(bits, Union{});
  }

  __device__ uint64_t measure_row(Measure measure, const Window &window, float lowest) {
    uint64_t sum = 0;
    row_.template scan<1>(group_, [&](int, const Eight &, const Eight &values) {
#pragma unroll
      for (int i = 0; i < OCTET; ++i) {
        if (values[i] < lowest || !is_inside(window, values[i])) continue;
        sum += measure == Measure::COUNT ? 1 : weigh_(values[i]);
      }
    });
    return group_.reduce(sum, Sum{});
  }

  Group &group_;
  FilterMemory &memory_;
  const Row &row_;
  const Weigh &weigh_;
  float scale_;
  uint32_t length_ = 0;
  bool is_listed_ = false;   // the list holds the window
  bool all_listed_ = false;  // and all that top-k keeps
};

}  // namespace baton::sampling
