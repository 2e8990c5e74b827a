// Decode attention's instructions: asynchronous copies, matrix loads, and m16n8k16 products with half a tile of zeros.
#pragma once

#include <cuda_fp16.h>

#include "e4m3.h"

namespace baton::decoding {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes to shared memory, or 16 zeros.
__device__ __forceinline__ void copy_async(uint32_t to, const uint8_t* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&into)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_transposed(uint32_t (&into)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
               : "r"(address)
               : "memory");
}

// 2^x; what is smaller than a normal float becomes zero.
__device__ __forceinline__ float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// Adds one to what all blocks see, publishes what this block has written before, and returns the number before.
__device__ __forceinline__ int arrive(int* arrivals) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
  return before;
}

// Adds a 16 x 16 tile, of which rows 8 to 15 are zero, times a 16 x 8 tile.
template <typename Kv>
__device__ __forceinline__ void multiply(float (&sum)[4], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(float (&sum)[4], uint32_t a0, uint32_t a2, uint32_t b0,
                                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, "
               "{%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply<__nv_fp8_e4m3>(float (&sum)[4], uint32_t a0, uint32_t a2, uint32_t b0,
                                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, "
               "{%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1));
}

// Two floats as a pair of the type that the tensor cores take beside Kv.
template <typename Kv>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}

template <>
__device__ __forceinline__ uint32_t pack<__nv_fp8_e4m3>(float low, float high) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t interleave(uint32_t bytes) { return __byte_perm(bytes, 0, 0x3120); }

}  // namespace baton::decoding
