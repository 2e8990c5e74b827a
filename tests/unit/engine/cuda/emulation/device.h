// A GPU's blocks on the CPU, as far as src/mid_rows.cu uses them: threads that take turns, shared memory, barriers,
// clusters, copies that end late and in any order, and the matrix instruction. What would be a fault or never end on a
// GPU ends the program with a message.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

using std::min;

[[noreturn]] inline void fail(const char *what) {
  fprintf(stderr, "%s\n", what);
  exit(1);
}

// ------------------------------------------------------------------------------------------------------------- values

struct float4 {
  float x, y, z, w;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  uint16_t low, high;
};
struct __nv_fp8_e4m3 {
  uint8_t bits;
};

inline float number(__nv_bfloat16 value) {
  const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
  float number;
  memcpy(&number, &wide, sizeof(number));
  return number;
}

inline float number(__nv_fp8_e4m3 value) {
  const int exponent = value.bits >> 3 & 15, fraction = value.bits & 7;
  const float size = exponent ? std::ldexp(1.f + fraction / 8.f, exponent - 7) : std::ldexp(fraction / 8.f, -6);
  return value.bits >> 7 ? -size : size;
}

inline __nv_bfloat16 rounded(float number) {
  uint32_t wide;
  memcpy(&wide, &number, sizeof(wide));
  return {static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
}

inline float __bfloat162float(__nv_bfloat16 value) { return number(value); }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {rounded(low).bits, rounded(high).bits}; }
template <typename T>
T __ldcg(const T *at) {
  return *at;
}

// ---------------------------------------------------------------------------------------------------- blocks, threads

struct Barrier {
  int count, pending, bytes, parity;

  void settle() {
    if (pending < 0) fail("more arrivals at a barrier than it counts");
    if (pending == 0 && bytes == 0) parity ^= 1, pending = count;
  }
};

// Where threads meet; `needed` of them.
struct Meeting {
  int arrived = 0, rounds = 0;
};

struct Cluster;

struct Block {
  Cluster *cluster;
  int index, rank, threads, running;
  std::vector<uint8_t> memory;
  std::map<uint32_t, Barrier> barriers;
  Meeting all, some;
  std::vector<Meeting> warps;
};

struct Cluster {
  std::vector<Block *> blocks;
  Meeting meeting;
  int running = 0;
};

struct Thread {
  Block *block;
  int index;
  bool done = false;
  ucontext_t context{};
  std::vector<char> stack = std::vector<char>(48 << 10);
};

struct Index {
  unsigned x;
};

inline Index threadIdx, blockIdx;
inline Thread *current;
inline ucontext_t device;
inline bool predecessor_finished;

// Lets the other threads take their turns.
inline void pass() {
  Thread *const mine = current;
  swapcontext(&mine->context, &device);
  current = mine, threadIdx.x = mine->index, blockIdx.x = mine->block->index;
}

inline void meet(Meeting &meeting, const int &needed) {
  const int round = meeting.rounds;
  ++meeting.arrived;
  while (meeting.rounds == round) {
    if (meeting.arrived >= needed)
      meeting.arrived = 0, ++meeting.rounds;
    else
      pass();
  }
  pass();
}

inline Block &here() { return *current->block; }

inline Block &there(int rank) {
  Block &block = *here().cluster->blocks.at(rank);
  if (block.running == 0) fail("a block is reached that has ended");
  return block;
}

inline Barrier &barrier_of(Block &block, uint32_t address) {
  if (block.running == 0) fail("a barrier is reached whose block has ended");
  if (block.barriers.count(address) == 0) fail("a barrier is used before it is made");
  return block.barriers[address];
}

inline void __syncthreads() { meet(here().all, here().threads); }
inline void __syncwarp() { meet(here().warps[current->index / 32], 32); }

// ------------------------------------------------------------------------------------------- common.h, tma.h, wgmma.h

struct CUtensorMap {
  const uint8_t *matrix;
  int rows, k, box_rows, value_bytes;
};

struct Copy {
  Cluster *cluster;
  uint16_t blocks;
  uint32_t to;
  const CUtensorMap *from;
  int column, row;
  uint32_t barrier;
};

inline std::vector<Copy> copies;

inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void finish(const Copy &copy) {
  const CUtensorMap &map = *copy.from;
  if (copy.to % 1024 != 0) fail("a tile begins inside a swizzled piece");
  for (size_t rank = 0; rank < copy.cluster->blocks.size(); ++rank) {
    if ((copy.blocks >> rank & 1) == 0) continue;
    Block &block = *copy.cluster->blocks[rank];
    Barrier &barrier = barrier_of(block, copy.barrier);
    for (int at = 0; at < map.box_rows * 128; ++at) {
      const int row = copy.row + at / 128, column = copy.column + at % 128 / map.value_bytes;
      const size_t from = (static_cast<size_t>(row) * map.k + column) * map.value_bytes + at % map.value_bytes;
      block.memory.at(swizzled(copy.to + at)) = row < map.rows && column < map.k ? map.matrix[from] : 0;
    }
    barrier.bytes -= map.box_rows * 128;
    barrier.settle();
  }
}

namespace baton {

constexpr int WARP = 32, GROUP_THREADS = 128, GROUP_ROWS = 64;

inline void wait_for_predecessor() {
  while (!predecessor_finished) pass();
}
inline void release_successor() {}

inline uint32_t shared_address(const void *at) {
  return static_cast<uint32_t>(static_cast<const uint8_t *>(at) - here().memory.data());
}
inline void make_barrier(uint32_t at, int count) { here().barriers[at] = {count, count, 0, 0}; }
inline void publish_barriers() {}
inline void expect_bytes(uint32_t at, int bytes) {
  Barrier &barrier = barrier_of(here(), at);
  barrier.bytes += bytes, --barrier.pending;
  barrier.settle();
  pass();
}
inline void arrive_at(uint32_t at, int rank) {
  Barrier &barrier = barrier_of(there(rank), at);
  --barrier.pending;
  barrier.settle();
  pass();
}
inline void wait_for(uint32_t at, int parity) {
  while (barrier_of(here(), at).parity == parity) pass();
}
template <int COUNT>
struct Ring {
  int stage = 0, parity = 0;
  void advance() {
    if (++stage == COUNT) stage = 0, parity ^= 1;
  }
};
template <int COUNT>
void sync_threads() {
  meet(here().some, COUNT);
}

inline void meet_cluster() { meet(here().cluster->meeting, here().cluster->running); }
inline void sync_cluster() { meet_cluster(); }
inline int cluster_rank() { return here().rank; }
inline uint32_t address_at(uint32_t address, int rank) { return address | static_cast<uint32_t>(rank) << 24; }
inline void store_at(uint32_t address, float value) { memcpy(&here().memory.at(address), &value, sizeof(value)); }
inline float4 load_from(uint32_t address) {
  if (address % sizeof(float4) != 0) fail("a load that is not aligned");
  float4 value;
  memcpy(&value, &there(address >> 24).memory.at(address & 0xffffff), sizeof(value));
  return value;
}

inline void fetch_description(const CUtensorMap &) {}
inline uint64_t read_once() { return 0; }
inline void copy_tile_to(uint16_t blocks, uint32_t to, const CUtensorMap &from, int column, int row, uint32_t barrier) {
  copies.push_back({here().cluster, blocks, to, &from, column, row, barrier});
  pass();
}
inline void copy_tile(uint32_t to, const CUtensorMap &from, int column, int row, uint32_t barrier, uint64_t = 0) {
  copy_tile_to(static_cast<uint16_t>(1 << here().rank), to, from, column, row, barrier);
}

inline uint64_t describe_operand(uint32_t address) { return address >> 4; }
inline void open_products() {}
inline void commit_products() {}
template <int PENDING>
void wait_for_products() {
  __syncwarp();
}
template <int COUNT>
void settle(float (&)[COUNT]) {}
template <typename Value, int COLUMNS>
void multiply_tiles(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, int accumulate) {
  const int lane = current->index % WARP, warp = current->index % GROUP_THREADS / WARP;
  const auto operand = [](uint64_t description, int row, int k) {
    Value value;
    const uint32_t at = static_cast<uint32_t>(description << 4) + row * 128 + k * sizeof(Value);
    memcpy(&value, &here().memory.at(swizzled(at)), sizeof(value));
    return number(value);
  };
  for (int i = 0; i < COLUMNS / 2; ++i) {
    const int row = 16 * warp + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (!accumulate) d[i] = 0.f;
    for (int k = 0; k < 32 / static_cast<int>(sizeof(Value)); ++k) d[i] += operand(a, row, k) * operand(b, column, k);
  }
}

}  // namespace baton
