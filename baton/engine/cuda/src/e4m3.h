// e4m3 values on their way into tensor cores, which on Hopper take them as halves beside another type.
#pragma once

#include "common.h"

namespace baton {

// Four e4m3 values as halves, the lower two bytes in x. Exact, in two instructions.
__device__ __forceinline__ uint2 e4m3_to_f16(unsigned word) {
  uint2 halves;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2;"
      " cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(halves.x), "=r"(halves.y)
      : "r"(word));
  return halves;
}

}  // namespace baton
