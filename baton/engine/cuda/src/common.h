// What all kernels share: the C interface, launches, and 16-byte vectors of bf16.
//
// Every exported function is `extern "C"`, returns a cudaError_t (0: queued; a cuBLAS status is returned negated), and
// takes device pointers, sizes and, last, the stream. None allocates or synchronises, so a graph can capture them all.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace baton {

constexpr int WARP = 32;

// ---------------------------------------------------------------------------------------------------------- launches

// Whether a kernel may start while its predecessor in the stream drains (programmatic dependent launch). A kernel
// launched so must call `wait_for_predecessor` in every thread before it touches memory that other kernels write, and
// must not return without it. The caller must know that the predecessor is a kernel, not a copy.
enum class Overlap : int { NO = 0, YES = 1 };

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   Overlap overlap, Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap == Overlap::YES ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// Waits until the kernels before this one in the stream have finished and their writes can be read. Free in a kernel
// that was launched without overlap.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel of the stream start, as far as it does not wait. Worth calling as soon as all blocks run.
__device__ __forceinline__ void release_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace baton
