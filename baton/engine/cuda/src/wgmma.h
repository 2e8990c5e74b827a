// Hopper's matrix instruction over a warpgroup: d[64, COLUMNS] += a[64, k] * b[COLUMNS, k]^T for 32 bytes of k, both
// operands in shared memory, of bf16 or e4m3, and float32 accumulators in registers. Operand rows of 128 bytes with the
// 128-byte swizzle, eight rows to 1024 bytes. Lane l of warp w holds of d, for every 8 columns j: row 16 w + l / 4,
// columns 8 j + 2 (l % 4) and the next in d[4 j] and d[4 j + 1], and row + 8 in d[4 j + 2] and d[4 j + 3].
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <stdint.h>

namespace baton {

constexpr int GROUP_THREADS = 128, GROUP_ROWS = 64;  // a warpgroup, and the rows of its products

// Describes an operand that begins at a shared-memory address; 32 bytes of k further on is 2 more.
__device__ __forceinline__ uint64_t describe_operand(uint32_t address) {
  constexpr uint64_t EIGHT_ROWS = 1024 >> 4, SWIZZLE_128 = 1;
  return (SWIZZLE_128 << 62) | (EIGHT_ROWS << 32) | (uint64_t{1} << 16) | ((address & 0x3ffff) >> 4);
}

__device__ __forceinline__ void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING groups of products are under way.
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from touching the accumulators before this point.
template <int COUNT>
__device__ __forceinline__ void settle(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// With accumulate 0, d starts from zero.
template <typename Value, int COLUMNS>
__device__ void multiply_tiles(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, int accumulate);

// clang-format off
#define BATON_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define BATON_NAMES_32 BATON_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BATON_NAMES_48 BATON_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define BATON_NAMES_64 BATON_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BATON_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BATON_DATA_16(i) BATON_FOUR(i), BATON_FOUR(i + 4), BATON_FOUR(i + 8), BATON_FOUR(i + 12)
#define BATON_DATA_32 BATON_DATA_16(0), BATON_DATA_16(16)
#define BATON_DATA_48 BATON_DATA_32, BATON_DATA_16(32)
#define BATON_DATA_64 BATON_DATA_48, BATON_DATA_16(48)

// `a`, `b` and `accumulate` are the operands after the accumulators: numbers A, B and P.
#define BATON_PRODUCT(VALUE, COLUMNS, SHAPE, TYPES, ORDER, A, B, P, NAMES, ...)                                        \
  template <>                                                                                                          \
  __device__ __forceinline__ void multiply_tiles<VALUE, COLUMNS>(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b,      \
                                                                 int accumulate) {                                     \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES " {" NAMES \
                 "}, " A ", " B ", p, 1, 1" ORDER ";}"                                                                 \
                 : __VA_ARGS__                                                                                         \
                 : "l"(a), "l"(b), "r"(accumulate));                                                                   \
  }
#define BATON_BOTH(COLUMNS, A, B, P, NAMES, ...)                                                                       \
  BATON_PRODUCT(__nv_bfloat16, COLUMNS, "m64n" #COLUMNS "k16", "bf16.bf16", ", 0, 0", A, B, P, NAMES, __VA_ARGS__)      \
  BATON_PRODUCT(__nv_fp8_e4m3, COLUMNS, "m64n" #COLUMNS "k32", "e4m3.e4m3", "", A, B, P, NAMES, __VA_ARGS__)

BATON_BOTH(32, "%16", "%17", "%18", BATON_NAMES_16, BATON_DATA_16(0))
BATON_BOTH(64, "%32", "%33", "%34", BATON_NAMES_32, BATON_DATA_32)
BATON_BOTH(96, "%48", "%49", "%50", BATON_NAMES_48, BATON_DATA_48)
BATON_BOTH(128, "%64", "%65", "%66", BATON_NAMES_64, BATON_DATA_64)

#undef BATON_BOTH
#undef BATON_PRODUCT
#undef BATON_DATA_64
#undef BATON_DATA_48
#undef BATON_DATA_32
#undef BATON_DATA_16
#undef BATON_FOUR
#undef BATON_NAMES_64
#undef BATON_NAMES_48
#undef BATON_NAMES_32
#undef BATON_NAMES_16
// clang-format on

}  // namespace baton
