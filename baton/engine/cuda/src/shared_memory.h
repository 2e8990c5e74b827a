// Kernels that need much of a multiprocessor's shared memory.
#pragma once

#include <cuda_runtime.h>

namespace baton {

// Lets `kernel` have `bytes` of dynamic shared memory. All such kernels ask for the same division between shared memory
// and L1 cache: a multiprocessor that has to change it first drains, and then neighbours in a stream cannot overlap.
template <typename Kernel>
cudaError_t allow_shared(Kernel *kernel, int bytes) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

}  // namespace baton
