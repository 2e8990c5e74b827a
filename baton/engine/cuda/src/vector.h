// 16-byte vectors of eight bf16, the unit in which all kernels here read and write rows.
#pragma once

#include "common.h"

namespace baton {

using Vector = uint4;
constexpr int VECTOR = 8;  // elements in a Vector

// Reads of what no kernel of the step writes, such as weights. Volatile and of the coherent kind, so that they stay
// ahead of `wait_for_predecessor`: the compiler moves others past it.
__device__ __forceinline__ Vector load_early(const void *at) {
  Vector value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(at));
  return value;
}

__device__ __forceinline__ int load_early(const int *at) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}

__device__ __forceinline__ void unpack(Vector packed, float (&values)[VECTOR]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

__device__ __forceinline__ Vector pack(const float (&values)[VECTOR]) {
  return {pack(values[0], values[1]), pack(values[2], values[3]), pack(values[4], values[5]),
          pack(values[6], values[7])};
}

__device__ __forceinline__ float round_to_bf16(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

constexpr float E4M3_MAX = 448.0f;

__device__ __forceinline__ uint32_t quantize(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2({c, d}, __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// Eight values times `factor` as e4m3, rounded to nearest even; values beyond the largest finite one become it.
__device__ __forceinline__ uint2 quantize(const float (&values)[VECTOR], float factor) {
  return {quantize(values[0] * factor, values[1] * factor, values[2] * factor, values[3] * factor),
          quantize(values[4] * factor, values[5] * factor, values[6] * factor, values[7] * factor)};
}

}  // namespace baton
