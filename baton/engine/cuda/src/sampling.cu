// Draws the next token of each row of logits: sampler.py's semantics, as a pure function of (seed, position, logits).
//
// One cluster of blocks a row. Weights are whole multiples of 2^-43 of the largest, so sums are exact in any order.
#include "sampling_filter.h"

namespace baton::sampling {

constexpr int MAX_VOCABULARY = 1 << 20;  // weights of at most 2^43 sum up in 64 bits

struct Sampler {
  const RowDraw *draws;
  const Edit *edits;
  uint32_t *counts;  // [slots, vocabulary_stride]
  uint32_t *seen;    // [slots, vocabulary_stride / 32] bits: tokens with a count
  const int *positions;
  int *tokens, *flags;
  int vocabulary, vocabulary_stride;
};

struct Shared {
  GroupMemory group;
  FilterMemory filter;
  int tile, token;
  uint64_t target;
  // Behind it: the weights of this block's tiles, then a bit for each token that is edited.
};

// Each is a key_of, larger where the row's value is larger; only `lowest` is turned round.
struct Extremes {
  uint64_t best;      // key of the largest logit, then ~token: the lowest token among equals
  uint32_t highest;   // of the raw logits, ~0 if one is NaN
  uint32_t lowest;    // ~key of the smallest logit
};

struct Outermost {
  __device__ Extremes operator()(const Extremes &a, const Extremes &b) const {
    return {max(a.best, b.best), max(a.highest, b.highest), max(a.lowest, b.lowest)};
  }
};

template <typename Row>
__device__ Extremes find_extremes(Group &group, const Row &row) {
  float best = -INFINITE, highest = -INFINITE, lowest = INFINITE;
  int token = 0;
  row.scan(group, [&](int first, const Eight &raw, const Eight &values) {
    highest = max_or_nan(highest, max_or_nan(raw));
#pragma unroll
    for (int i = 0; i < OCTET; ++i) lowest = fminf(lowest, values[i]);
    if (max_or_nan(values) <= best) return;
#pragma unroll
    for (int i = 0; i < OCTET; ++i) {
      if (values[i] > best) {
        best = values[i];
        token = first + i;
      }
    }
  });
  const uint64_t first = static_cast<uint64_t>(key_of(best)) << 32 | static_cast<uint32_t>(~token);
  const Extremes own{first, highest == highest ? key_of(highest) : ~0u, ~key_of(lowest)};
  return group.reduce(own, Outermost{});
}

// Draws in proportion to the weights of the logits of at least `threshold`: the token at which the weight, in order of
// tokens, passes the row's random share of the whole. Each tile is weighed, then block 0 finds the tile and the token.
template <typename Row>
class Lottery {
 public:
  // `weights` is shared memory for the tiles of this block.
  __device__ Lottery(Group &group, Shared &shared, uint64_t *weights, const Row &row, const Weigh &weigh,
                     float threshold)
      : group_(group), shared_(shared), weights_(weights), row_(row), weigh_(weigh), threshold_(threshold) {}

  // In all threads of block 0; the others get `otherwise`.
  __device__ int draw(uint64_t random, int otherwise) {
    weigh_tiles();
    group_.sync();
    if (group_.rank() == 0) {
      if (threadIdx.x == 0) shared_.token = otherwise;
      find_tile(random);
    }
    group_.sync();  // nobody leaves before block 0 has read the weights
    if (group_.rank() != 0) return otherwise;
    find_token();
    __syncthreads();
    return shared_.token;
  }

 private:
  __device__ void weigh_tiles() {
    uint64_t own = 0;
    row_.template scan<Row::HEAVY>(
        group_,
        [&](int, const Eight &, const Eight &values) {
          if (max_or_nan(values) < threshold_) return;
#pragma unroll
          for (int i = 0; i < OCTET; ++i) own += weight(values[i]);
        },
        [&](int tile) {
          const uint64_t sum = reduce_lanes(own, WARP, Sum{});
          if (Group::lane() == 0) weights_[tile / group_.warps() * WARPS + threadIdx.x / WARP] = sum;
          own = 0;
        });
  }

  // No branch, so that several logits are weighed at once.
  __device__ __forceinline__ uint64_t weight(float value) const {
    return weigh_.at(value >= threshold_ ? weigh_.distance(value) : weigh_.nowhere);
  }

  __device__ uint64_t tile_weight(int tile) const {
    const int owner = tile % group_.warps();
    return *group_.peer(&weights_[tile / group_.warps() * WARPS + owner % WARPS], owner / WARPS);
  }

  __device__ void find_tile(uint64_t random) {
    const int tiles = row_.tiles(), share = (tiles + THREADS - 1) / THREADS;
    const int first = min(static_cast<int>(threadIdx.x) * share, tiles), last = min(first + share, tiles);
    uint64_t own = 0;
    for (int tile = first; tile < last; ++tile) own += tile_weight(tile);
    const uint64_t reached = group_.scan_block(own);
    const uint64_t target = __umul64hi(random << 11, group_.reduce_block(own, Sum{}));
    if (reached <= target || reached - own > target) return;
    uint64_t below = reached - own;
    int tile = first;
    for (uint64_t next = below + tile_weight(tile); next <= target; next += tile_weight(tile)) {
      below = next;
      ++tile;
    }
    shared_.tile = tile;
    shared_.target = target - below;
  }

  __device__ void find_token() {
    constexpr int NEIGHBOURS = TILE / THREADS;
    const int first = shared_.tile * TILE + threadIdx.x * NEIGHBOURS;
    uint64_t weights[NEIGHBOURS];
    uint64_t own = 0;
#pragma unroll
    for (int i = 0; i < NEIGHBOURS; ++i) {
      weights[i] = first + i < row_.vocabulary ? weight(row_.at(first + i)) : 0;
      own += weights[i];
    }
    const uint64_t reached = group_.scan_block(own);
    if (reached <= shared_.target || reached - own > shared_.target) return;
    uint64_t below = reached - own;
    int i = 0;
    for (; i < NEIGHBOURS - 1 && below + weights[i] <= shared_.target; ++i) below += weights[i];
    shared_.token = first + i;
  }

  Group &group_;
  Shared &shared_;
  uint64_t *weights_;
  const Row &row_;
  const Weigh &weigh_;
  float threshold_;
};

template <typename Row>
__device__ int draw_token(Group &group, Shared &shared, uint64_t *weights, const Row &row, const RowDraw &draw,
                          const Extremes &extremes, int position) {
  const float largest = value_of(extremes.best >> 32);
  const Weigh weigh{largest, draw.inverse_high, draw.inverse_low, -1.3f * draw.span};
  float threshold = -INFINITE;
  if (draw.top_k > 0 || draw.top_p < 1.0) {
    Filter<Row> filter(group, shared.filter, row, weigh, value_of(~extremes.lowest), draw.span);
    threshold = filter.threshold(draw.top_k, draw.top_p);
  }
  threshold = fmaxf(threshold, __double2float_ru(largest + draw.min_p_drop));
  threshold = fmaxf(threshold, __fsub_rn(largest, draw.span));  // the others weigh nothing
  const int likeliest = static_cast<int>(~static_cast<uint32_t>(extremes.best));
  Lottery<Row> lottery(group, shared, weights, row, weigh, threshold);
  return lottery.draw(random_bits(draw.seed, position), likeliest);
}

template <typename T, bool EDITED>
__device__ void sample_row(const Sampler &sampler, Group &group, Shared &shared, uint64_t *weights,
                           const Logits<T, EDITED> &row, const RowDraw &draw, int index) {
  const Extremes extremes = find_extremes(group, row);
  const bool finite = extremes.highest < key_of(INFINITE) && extremes.highest > key_of(-INFINITE);
  int token = finite ? static_cast<int>(~static_cast<uint32_t>(extremes.best)) : 0;
  const float largest = value_of(extremes.best >> 32);
  if (finite && draw.kind == Kind::DRAWN && largest > -INFINITE && largest < INFINITE) {
    token = draw_token(group, shared, weights, row, draw, extremes, sampler.positions[index] + 1);
  }
  if (group.rank() != 0 || threadIdx.x != 0) return;
  sampler.tokens[index] = token;
  sampler.flags[index] = finite ? SOUND : NOT_FINITE;
  if (!finite || draw.slot < 0) return;
  sampler.counts[static_cast<size_t>(draw.slot) * sampler.vocabulary_stride + token] += 1;
  sampler.seen[static_cast<size_t>(draw.slot) * (sampler.vocabulary_stride / 32) + token / 32] |= 1u << token % 32;
}

// Sets the bits of all tokens that the row's penalties or edits change.
__device__ void mark(const Sampler &sampler, const RowDraw &draw, uint32_t *marks) {
  const int words = sampler.vocabulary_stride / 32;
  const uint32_t *seen = sampler.seen + static_cast<size_t>(max(draw.slot, 0)) * words;
  for (int i = threadIdx.x; i < words; i += THREADS) marks[i] = draw.slot < 0 ? 0 : seen[i];
  __syncthreads();
  for (int i = threadIdx.x; i < draw.edits; i += THREADS) {
    const int token = sampler.edits[draw.first_edit + i].token;
    atomicOr(&marks[token / 32], 1u << token % 32);
  }
  __syncthreads();
}

__host__ __device__ constexpr int tile_weights(int vocabulary, int blocks) {
  const int tiles = (vocabulary + TILE - 1) / TILE;
  return (tiles + blocks * WARPS - 1) / (blocks * WARPS) * WARPS;
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 2) sample(const T *logits, int stride, bool aligned, Sampler sampler) {
  extern __shared__ __align__(16) unsigned char arena[];
  Shared &shared = *reinterpret_cast<Shared *>(arena);
  Group group(shared.group);
  const int index = blockIdx.x / group.size();
  const RowDraw &draw = sampler.draws[index];
  wait_for_predecessor();
  if (draw.kind == Kind::IDLE || sampler.positions[index] < 0) return;
  if (draw.kind == Kind::REFUSED) {
    if (group.rank() == 0 && threadIdx.x == 0) {
      sampler.tokens[index] = 0;
      sampler.flags[index] = TOO_MANY_EDITS;
    }
    return;
  }
  uint64_t *weights = reinterpret_cast<uint64_t *>(arena + sizeof(Shared));
  const T *row = logits + static_cast<size_t>(index) * stride;
  if (draw.slot < 0 && draw.edits == 0) {
    const Logits<T, false> plain{row, sampler.vocabulary, aligned, {}};
    sample_row(sampler, group, shared, weights, plain, draw, index);
    return;
  }
  uint32_t *marks = reinterpret_cast<uint32_t *>(weights + tile_weights(sampler.vocabulary, group.size()));
  mark(sampler, draw, marks);
  const uint32_t *counts =
      draw.slot < 0 ? nullptr : sampler.counts + static_cast<size_t>(draw.slot) * sampler.vocabulary_stride;
  const Edits edits{reinterpret_cast<const unsigned char *>(marks),
                    counts,
                    sampler.edits + draw.first_edit,
                    draw.edits,
                    draw.repetition,
                    draw.presence,
                    draw.frequency};
  const Logits<T, true> changed{row, sampler.vocabulary, aligned, edits};
  sample_row(sampler, group, shared, weights, changed, draw, index);
}

// A part of a context to count: `prompt` tokens, then `output` tokens, from `first` on. sampling_rows.py writes it.
struct Count {
  int32_t slot;
  int32_t fresh;  // 1: forget what the slot held
  int32_t first, prompt, output;
  int32_t unused[3];
};
static_assert(sizeof(Count) == 32);

// One block a part; a slot has at most one part in a launch.
__global__ void __launch_bounds__(THREADS)
    count_contexts(const Count *parts, const int *tokens, uint32_t *counts, uint32_t *seen, int vocabulary,
                   int stride) {
  const Count part = parts[blockIdx.x];
  counts += static_cast<size_t>(part.slot) * stride;
  seen += static_cast<size_t>(part.slot) * (stride / 32);
  if (part.fresh) {
    for (int i = threadIdx.x; i < stride; i += THREADS) counts[i] = 0;
    for (int i = threadIdx.x; i < stride / 32; i += THREADS) seen[i] = 0;
    __syncthreads();
  }
  for (int i = threadIdx.x; i < part.prompt + part.output; i += THREADS) {
    const int token = tokens[part.first + i];
    if (token < 0 || token >= vocabulary) continue;
    if (i < part.prompt) {
      atomicOr(&counts[token], IN_PROMPT);
    } else {
      atomicAdd(&counts[token], 1u);
    }
    atomicOr(&seen[token / 32], 1u << token % 32);
  }
}

inline size_t shared_bytes(int vocabulary, int stride, int blocks) {
  return sizeof(Shared) + tile_weights(vocabulary, blocks) * sizeof(uint64_t) + stride / 8;
}

template <typename T>
cudaError_t launch_sample(const void *logits, int stride, int rows, int blocks, const Sampler &sampler,
                          Overlap overlap, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = blocks;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(rows * blocks);
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = shared_bytes(sampler.vocabulary, sampler.vocabulary_stride, blocks);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = overlap == Overlap::YES ? 2 : 1;
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % sizeof(uint4) == 0 &&
                       stride * sizeof(T) % sizeof(uint4) == 0 && sampler.vocabulary % OCTET == 0;
  return cudaLaunchKernelEx(&config, sample<T>, static_cast<const T *>(logits), stride, aligned, sampler);
}

}  // namespace baton::sampling

// Lets `baton_sample` use the shared memory that rows of `vocabulary` logits need. Call once before the first launch.
extern "C" int baton_sampling_prepare(int vocabulary, int vocabulary_stride) {
  using namespace baton::sampling;
  if (vocabulary < 1 || vocabulary > MAX_VOCABULARY) return cudaErrorInvalidValue;
  const int bytes = static_cast<int>(shared_bytes(vocabulary, vocabulary_stride, 1));
  const cudaError_t code =
      cudaFuncSetAttribute(sample<__nv_bfloat16>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (code != cudaSuccess) return code;
  return cudaFuncSetAttribute(sample<float>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Draws a token for each of `rows` rows of logits, bf16 or float32, `stride` elements apart. `table` holds RowDraw
// [max_rows] and the rows' edits; counts is uint32 [slots, vocabulary_stride] and seen has a bit for each; row r's
// token follows position positions[r], and is not drawn if that is negative; tokens and flags (a Flag) are int32.
extern "C" int baton_sample(const void *logits, int is_float, int stride, int vocabulary, int vocabulary_stride,
                            int rows, int blocks, const void *table, int max_rows, void *counts, void *seen,
                            const void *positions, void *tokens, void *flags, int overlap, cudaStream_t stream) {
  using namespace baton::sampling;
  if (rows == 0) return cudaSuccess;
  const RowDraw *draws = static_cast<const RowDraw *>(table);
  const Sampler sampler{draws,
                        reinterpret_cast<const Edit *>(draws + max_rows),
                        static_cast<uint32_t *>(counts),
                        static_cast<uint32_t *>(seen),
                        static_cast<const int *>(positions),
                        static_cast<int *>(tokens),
                        static_cast<int *>(flags),
                        vocabulary,
                        vocabulary_stride};
  const auto allowed = static_cast<baton::Overlap>(overlap);
  return is_float ? launch_sample<float>(logits, stride, rows, blocks, sampler, allowed, stream)
                  : launch_sample<__nv_bfloat16>(logits, stride, rows, blocks, sampler, allowed, stream);
}

// Counts `parts` parts of contexts into their slots. `table` holds Count [parts], then the tokens (int32).
extern "C" int baton_count_contexts(const void *table, int parts, void *counts, void *seen, int vocabulary,
                                    int vocabulary_stride, cudaStream_t stream) {
  using namespace baton::sampling;
  if (parts == 0) return cudaSuccess;
  const Count *first = static_cast<const Count *>(table);
  count_contexts<<<parts, THREADS, 0, stream>>>(first, reinterpret_cast<const int *>(first + parts),
                                                static_cast<uint32_t *>(counts), static_cast<uint32_t *>(seen),
                                                vocabulary, vocabulary_stride);
  return cudaGetLastError();
}
