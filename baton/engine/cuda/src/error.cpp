// Names for the codes that the exported functions return.
#include <cuda_runtime.h>

extern "C" const char *baton_error_name(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
