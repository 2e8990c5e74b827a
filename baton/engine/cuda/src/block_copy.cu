// KV blocks copied from one pool into another, which may be another process's or another GPU's, and digested as they
// pass. One kernel does both; it also packs blocks into a buffer, takes them out of one, or digests alone.
//
// The digest of a block is a sum over its 64-bit words, each mixed with its position by a bijection. A sum needs no
// order, so threads share nothing until their sums meet; any change of a single word changes it for certain, and
// changes of several cancel with a chance of 2^-64 for each of two independently keyed lanes. It is made to find broken
// hardware and misplaced bytes; it is no defence against somebody who makes collisions on purpose. Its definition in
// numpy is baton/engine/digest.py, and both must say the same.
#include "common.h"

namespace baton {

using Vector = uint4;  // 16 bytes: two words

constexpr int BLOCK_COPY_THREADS = 256;
constexpr int DEPTH = 8;  // vectors that a thread has in flight
constexpr int SEGMENT = BLOCK_COPY_THREADS * DEPTH;  // vectors that a CTA takes at a time: 32 KiB
constexpr int CTAS_PER_SM = 3;
constexpr int LANES = 2;

// Far apart for neighbouring numbers (the finalizer of splitmix64, Steele et al. 2014).
__device__ __forceinline__ uint64_t scrambled(uint64_t number) {
  uint64_t x = number * 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

// One lane: the step between the keys of neighbouring words, and the two multipliers of the mix.
struct Light {
  static constexpr uint64_t STEP = 0x9e3779b97f4a7c15ull, FIRST = 0xbf58476d1ce4e5b9ull, SECOND = 0x94d049bb133111ebull;
};

struct Strong {
  static constexpr uint64_t STEP = 0xd1342543de82ef95ull, FIRST = 0xff51afd7ed558ccdull, SECOND = 0xc4ceb9fe1a85ec53ull;
};

// A bijection for each position: `key` belongs to the block and lane, `word` counts from the block's beginning.
template <typename Lane>
__device__ __forceinline__ uint64_t mixed(uint64_t value, uint64_t key, uint32_t word) {
  uint64_t x = value ^ (key + word * Lane::STEP);
  x ^= x >> 32;
  x *= Lane::FIRST;
  x ^= x >> 29;
  x *= Lane::SECOND;
  return x ^ x >> 32;
}

template <typename Lane>
__device__ __forceinline__ uint64_t mixed(const Vector &vector, uint64_t key, uint32_t at) {
  const uint64_t low = vector.x | static_cast<uint64_t>(vector.y) << 32;
  const uint64_t high = vector.z | static_cast<uint64_t>(vector.w) << 32;
  return mixed<Lane>(low, key, 2 * at) + mixed<Lane>(high, key, 2 * at + 1);
}

// Adds up over the warp and into `*total`.
__device__ __forceinline__ void add_up(uint64_t sum, uint64_t *total) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (threadIdx.x % WARP == 0) atomicAdd(reinterpret_cast<unsigned long long *>(total), sum);
}

struct BlockCopy {
  const Vector *source;
  Vector *target;                      // null: digest only
  const int *source_ids, *target_ids;  // [count]; null: block i stands at place i
  const unsigned char *strong;         // [count], whether the second lane is wanted, too
  uint64_t *digests;                   // [count, LANES], zero; null: copy only
  int count, first_ordinal;            // the first block's place in its sequence, which decides the keys
  int block_vectors;
  int run_vectors, slot_vectors;  // of one head's slots, and of one slot of it: only `filled` slots of the last block
  int filled;                     // are copied and digested, and the others zeroed; 0: all of them
};

// Vectors `first + d * BLOCK_COPY_THREADS` of a block: bit d of the result is set if that one is to be copied.
__device__ __forceinline__ unsigned live_vectors(const BlockCopy &work, int first, bool partly) {
  unsigned live = 0;
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    const int at = first + d * BLOCK_COPY_THREADS;
    bool is_live = at < work.block_vectors;
    if (partly) is_live = is_live && at % work.run_vectors / work.slot_vectors < work.filled;
    live |= static_cast<unsigned>(is_live) << d;
  }
  return live;
}

__device__ __forceinline__ uint64_t key_of(const BlockCopy &work, int block, int lane) {
  return scrambled(static_cast<uint64_t>(work.first_ordinal + block) * LANES + lane + 1);
}

template <bool COPY, bool DIGEST>
__device__ __forceinline__ void take_segment(const BlockCopy &work, int block, int first) {
  const bool partly = work.filled != 0 && block == work.count - 1;
  const unsigned live = live_vectors(work, first, partly);
  const size_t from = work.source_ids != nullptr ? work.source_ids[block] : block;
  const Vector *source = work.source + from * work.block_vectors + first;
  Vector data[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    data[d] = live >> d & 1 ? __ldcs(source + d * BLOCK_COPY_THREADS) : Vector{0, 0, 0, 0};
  }
  if constexpr (COPY) {
    const size_t to = work.target_ids != nullptr ? work.target_ids[block] : block;
    Vector *target = work.target + to * work.block_vectors + first;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (first + d * BLOCK_COPY_THREADS < work.block_vectors) __stcs(target + d * BLOCK_COPY_THREADS, data[d]);
    }
  }
  if constexpr (DIGEST) {
    uint64_t sum = 0;
    const uint64_t key = key_of(work, block, 0);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (live >> d & 1) sum += mixed<Light>(data[d], key, first + d * BLOCK_COPY_THREADS);
    }
    add_up(sum, work.digests + block * LANES);
    if (!work.strong[block]) return;
    sum = 0;
    const uint64_t other = key_of(work, block, 1);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (live >> d & 1) sum += mixed<Strong>(data[d], other, first + d * BLOCK_COPY_THREADS);
    }
    add_up(sum, work.digests + block * LANES + 1);
  }
}

// Grid: any number of CTAs, which take segments by turns.
template <bool COPY, bool DIGEST>
__global__ void __launch_bounds__(BLOCK_COPY_THREADS, CTAS_PER_SM) copy_blocks(const BlockCopy work) {
  const int segments = (work.block_vectors + SEGMENT - 1) / SEGMENT;
  for (int item = blockIdx.x; item < work.count * segments; item += gridDim.x) {
    const int block = item / segments;
    take_segment<COPY, DIGEST>(work, block, item % segments * SEGMENT + threadIdx.x);
  }
}

inline cudaError_t launch_block_copy(const BlockCopy &work, int ctas, cudaStream_t stream) {
  const int items = work.count * ((work.block_vectors + SEGMENT - 1) / SEGMENT);
  const dim3 grid(items < ctas ? items : ctas);
  if (work.digests == nullptr) {
    copy_blocks<true, false><<<grid, BLOCK_COPY_THREADS, 0, stream>>>(work);
  } else if (work.target == nullptr) {
    copy_blocks<false, true><<<grid, BLOCK_COPY_THREADS, 0, stream>>>(work);
  } else {
    copy_blocks<true, true><<<grid, BLOCK_COPY_THREADS, 0, stream>>>(work);
  }
  return cudaGetLastError();
}

}  // namespace baton

// target[target_ids[i]] = source[source_ids[i]] for `count` blocks of `block_bytes`, and digests[i] of what was read, as
// of the block at `first_ordinal + i` of a sequence; ids are int32 on the device and a null list means 0, 1, ...; a null
// target or null digests leave that part out. Of the last block `filled` token slots count (0: all); a slot is
// `slot_bytes` in each of the runs of `run_bytes` that a block is made of. At most `ctas` CTAs work on it. All addresses
// and sizes are multiples of 16.
extern "C" int baton_copy_blocks(const void *source, void *target, const void *source_ids, const void *target_ids,
                                 const void *strong, void *digests, int count, int first_ordinal, size_t block_bytes,
                                 int run_bytes, int slot_bytes, int filled, int ctas, cudaStream_t stream) {
  using namespace baton;
  constexpr int BYTES = sizeof(Vector);
  if (count == 0) return cudaSuccess;
  if (count < 0 || first_ordinal < 0 || ctas < 1 || block_bytes % BYTES != 0 || block_bytes / BYTES > INT32_MAX / 2 ||
      run_bytes % BYTES != 0 || slot_bytes % BYTES != 0 || run_bytes < slot_bytes || slot_bytes < BYTES ||
      (target == nullptr && digests == nullptr)) {
    return cudaErrorInvalidValue;
  }
  const BlockCopy work = {static_cast<const Vector *>(source),
                          static_cast<Vector *>(target),
                          static_cast<const int *>(source_ids),
                          static_cast<const int *>(target_ids),
                          static_cast<const unsigned char *>(strong),
                          static_cast<uint64_t *>(digests),
                          count,
                          first_ordinal,
                          static_cast<int>(block_bytes / BYTES),
                          run_bytes / BYTES,
                          slot_bytes / BYTES,
                          filled};
  if (digests != nullptr) {
    const cudaError_t error = cudaMemsetAsync(digests, 0, sizeof(uint64_t) * LANES * count, stream);
    if (error != cudaSuccess) return error;
  }
  return launch_block_copy(work, ctas, stream);
}
