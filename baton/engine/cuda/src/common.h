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

// How a multiprocessor's 256 KB are divided, as the percentage of 228 KB that is shared memory; the rest is L1 cache.
// A multiprocessor divides them anew only when nothing runs on it, so neighbours in a chain must agree: on an H200 a
// decode step of one row of Llama-3-8B took 6.1 ms where they did not, and 4.0 where they do. ANY asks for nothing.
enum class Division : int { ANY = -1, HALF = 57, LARGEST = 100 };

// Steps of so few rows are made of kernels that read weights through the L1 cache, where loads under way take up room.
constexpr int FEW_ROWS = 4;
constexpr Division division(int rows) { return rows <= FEW_ROWS ? Division::HALF : Division::LARGEST; }

template <typename... Parameters, typename... Arguments>
cudaError_t launch_divided(Division division, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                           cudaStream_t stream, Overlap overlap, Arguments... arguments) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (overlap == Overlap::YES) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (division != Division::ANY) {
    attributes[config.numAttrs].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[config.numAttrs++].val.sharedMemCarveout = static_cast<unsigned>(division);
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   Overlap overlap, Arguments... arguments) {
  return launch_divided(Division::ANY, kernel, grid, block, shared_bytes, stream, overlap, arguments...);
}

// Waits until the kernels before this one in the stream have finished and their writes can be read. Free in a kernel
// that was launched without overlap.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel of the stream start, as far as it does not wait. Worth calling as soon as all blocks run.
__device__ __forceinline__ void release_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace baton
