// Device memory that other processes of this host may map.
#include <cuda.h>
#include <cuda_runtime.h>
#include <string.h>

// The handle (CUDA_IPC_HANDLE_SIZE bytes) of the allocation that `address` lies in, and how far into it. The memory
// must come from cudaMalloc: what is mapped page by page (expandable segments) is refused by the driver.
extern "C" int baton_ipc_export(const void *address, void *handle, size_t *offset) {
  void *function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  cudaError_t error = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12000, cudaEnableDefault,
                                                       &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const auto range_of = reinterpret_cast<CUresult (*)(CUdeviceptr *, size_t *, CUdeviceptr)>(function);
  CUdeviceptr base = 0;
  size_t size = 0;
  if (range_of(&base, &size, reinterpret_cast<CUdeviceptr>(address)) != CUDA_SUCCESS) return cudaErrorInvalidValue;
  *offset = reinterpret_cast<CUdeviceptr>(address) - base;
  cudaIpcMemHandle_t exported;
  error = cudaIpcGetMemHandle(&exported, reinterpret_cast<void *>(base));
  if (error == cudaSuccess) memcpy(handle, &exported, sizeof(exported));
  return error;
}

// Maps another process's allocation on the current device; peer access to its GPU is enabled with it.
extern "C" int baton_ipc_open(const void *handle, void **base) {
  cudaIpcMemHandle_t exported;
  memcpy(&exported, handle, sizeof(exported));
  const cudaError_t error = cudaIpcOpenMemHandle(base, exported, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) cudaGetLastError();  // refused, and nothing is wrong here: later calls must not see it
  return error;
}

// Nothing may read from `base` any more.
extern "C" int baton_ipc_close(void *base) { return cudaIpcCloseMemHandle(base); }
