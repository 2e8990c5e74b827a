// Tiles of matrices copied to shared memory by Hopper's copy engine (TMA), the barriers that tell of them, and clusters.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace baton {

constexpr unsigned PATIENCE = 1u << 26;  // polls of something that takes microseconds, before the kernel gives up

// ---------------------------------------------------------------------------------------------------------- barriers

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void make_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Shows barriers just made to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the same barrier of block `rank` of the cluster.
__device__ __forceinline__ void arrive_at(uint32_t barrier, int rank) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
      " mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Waits for the end of the phase with this parity. A wait that never ends is a fault, and must not look like work.
__device__ __forceinline__ void wait_for(uint32_t barrier, int parity) {
  uint32_t done = 0;
#pragma unroll 1
  for (unsigned polls = 0; polls < PATIENCE; ++polls) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
  }
  __trap();
}

// A place in the ring of stages, and the parity of its phase.
template <int COUNT>
struct Ring {
  int stage = 0, parity = 0;
  __device__ void advance() {
    if (++stage == COUNT) stage = 0, parity ^= 1;
  }
};

// The first COUNT threads of a block meet.
template <int COUNT>
__device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}

// ---------------------------------------------------------------------------------------------------------- clusters

// All threads of the cluster meet. What was written before is not necessarily seen by the others.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// All threads of the cluster meet, and see what was written to shared memory before. A barrier that releases by itself
// would wait for global memory, too, which is busy.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
  meet_cluster();
}

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address in block `rank` of the cluster of what lies here at `address`.
__device__ __forceinline__ uint32_t address_at(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void store_at(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ float4 load_from(uint32_t address) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// ------------------------------------------------------------------------------------------------------------ copies

__device__ __forceinline__ void fetch_description(const CUtensorMap &map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The policy of data that is read once: it goes first from the L2 cache.
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap &from, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&from), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap &from, int column, int row, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&from), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// The same to the same place in every block of the cluster whose bit is set in `blocks`, and each is told by its barrier.
__device__ __forceinline__ void copy_tile_to(uint16_t blocks, uint32_t to, const CUtensorMap &from, int column, int row,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&from), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

// ------------------------------------------------------------------------------------------------------ descriptions

// The driver's cuTensorMapEncodeTiled.
using EncodeTiled = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                 const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// A matrix [rows, k] of bf16, or of values of one byte, in boxes of `box_rows` rows and 128 bytes of each; what lies
// past its edges reads as zero.
inline cudaError_t describe_matrix(const void *encode, CUtensorMap *map, const void *matrix, int rows, int k,
                                   int box_rows, int value_bytes) {
  const int box_k = 128 / value_bytes;
  const auto type = value_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(k) * value_bytes};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_k), static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUresult code = reinterpret_cast<EncodeTiled>(const_cast<void *>(encode))(
      map, type, 2, const_cast<void *>(matrix), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return code == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace baton
