// The blocks that share one row: a cluster of 1, 2, 4 or 8, with reductions that leave the same bits in every thread.
//
// All sums are of integers, so how a row is spread over blocks and threads cannot change what is drawn from it.
#pragma once

#include <cooperative_groups.h>

#include "common.h"

namespace baton::sampling {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
constexpr int MAX_BLOCKS = 8;  // of one row
constexpr int PARTIAL_BYTES = 32;

struct Sum {
  template <typename T>
  __device__ __forceinline__ T operator()(const T &a, const T &b) const {
    return a + b;
  }
};

template <typename T>
__device__ __forceinline__ T exchange(const T &value, int step) {
  static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= PARTIAL_BYTES);
  constexpr int WORDS = sizeof(T) / 4;
  uint32_t words[WORDS];
  memcpy(words, &value, sizeof(T));
#pragma unroll
  for (int i = 0; i < WORDS; ++i) words[i] = __shfl_xor_sync(~0u, words[i], step);
  T other;
  memcpy(&other, words, sizeof(T));
  return other;
}

template <typename T, typename Combine>
__device__ __forceinline__ T reduce_lanes(T value, int lanes, Combine combine) {
  for (int step = lanes / 2; step > 0; step /= 2) value = combine(value, exchange(value, step));
  return value;
}

// The sum over this lane and those before it.
template <typename T>
__device__ __forceinline__ T scan_lanes(T value) {
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    const T before = __shfl_up_sync(~0u, value, step);
    if (static_cast<int>(threadIdx.x % WARP) >= step) value += before;
  }
  return value;
}

// Room for results on their way between warps and between blocks. There are two of each, used in turn: whoever writes
// one for the second time has passed the barrier of the call in between, so nobody still reads it.
struct GroupMemory {
  alignas(16) unsigned char warps[2][WARPS][PARTIAL_BYTES];
  alignas(16) unsigned char blocks[2][MAX_BLOCKS][PARTIAL_BYTES];
};

class Group {
 public:
  __device__ explicit Group(GroupMemory &memory)
      : memory_(memory),
        rank_(cooperative_groups::this_cluster().block_rank()),
        size_(cooperative_groups::this_cluster().num_blocks()) {}

  __device__ int rank() const { return rank_; }
  __device__ int size() const { return size_; }
  __device__ int warps() const { return size_ * WARPS; }
  __device__ int warp() const { return rank_ * WARPS + threadIdx.x / WARP; }
  __device__ static int lane() { return threadIdx.x % WARP; }

  // All threads of all blocks; what they wrote before can be read after.
  __device__ void sync() const {
    if (size_ == 1) {
      __syncthreads();
    } else {
      cooperative_groups::this_cluster().sync();
    }
  }

  // The object in the shared memory of block `rank` that lies where `own` lies in this block's.
  template <typename T>
  __device__ T *peer(T *own, int rank) const {
    return cooperative_groups::this_cluster().map_shared_rank(own, rank);
  }

  // `combine` over the threads of this block.
  template <typename T, typename Combine>
  __device__ T reduce_block(T value, Combine combine) {
    value = reduce_lanes(value, WARP, combine);
    const int turn = block_turn_;
    block_turn_ ^= 1;
    if (lane() == 0) *as<T>(memory_.warps[turn][threadIdx.x / WARP]) = value;
    __syncthreads();
    return reduce_lanes(*as<T>(memory_.warps[turn][lane() % WARPS]), WARPS, combine);
  }

  // `combine` over the threads of all blocks.
  template <typename T, typename Combine>
  __device__ T reduce(T value, Combine combine) {
    value = reduce_block(value, combine);
    if (size_ == 1) return value;
    const int turn = group_turn_;
    group_turn_ ^= 1;
    if (static_cast<int>(threadIdx.x) < size_) *as<T>(peer(&memory_.blocks[turn][rank_][0], threadIdx.x)) = value;
    sync();
    return reduce_lanes(*as<T>(memory_.blocks[turn][lane() % size_]), size_, combine);
  }

  // The sum over this thread and those before it in the block.
  template <typename T>
  __device__ T scan_block(T value) {
    value = scan_lanes(value);
    const int turn = block_turn_;
    block_turn_ ^= 1;
    const int warp = threadIdx.x / WARP;
    if (lane() == WARP - 1) *as<T>(memory_.warps[turn][warp]) = value;
    __syncthreads();
    for (int i = 0; i < warp; ++i) value += *as<T>(memory_.warps[turn][i]);
    return value;
  }

 private:
  template <typename T>
  __device__ static T *as(unsigned char *bytes) {
    return reinterpret_cast<T *>(bytes);
  }

  GroupMemory &memory_;
  int rank_, size_;
  int block_turn_ = 0, group_turn_ = 0;
};

}  // namespace baton::sampling
