// The same copies as in block_copy.cu by the copy engines, which take no SM from the model but digest nothing.
#include <cuda_runtime.h>

#include <vector>

// target[target_ids[i]] = source[source_ids[i]] for `count` blocks; the ids are on the host. Neighbours that stay
// neighbours travel as one copy. `stream` is not the default stream.
extern "C" int baton_copy_blocks_by_engine(const void *source, void *target, const int *source_ids,
                                           const int *target_ids, int count, size_t block_bytes, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  std::vector<const void *> from, to;
  std::vector<size_t> sizes;
  for (int i = 0; i < count; ++i) {
    if (i > 0 && source_ids[i] == source_ids[i - 1] + 1 && target_ids[i] == target_ids[i - 1] + 1) {
      sizes.back() += block_bytes;
      continue;
    }
    from.push_back(static_cast<const char *>(source) + source_ids[i] * block_bytes);
    to.push_back(static_cast<char *>(target) + target_ids[i] * block_bytes);
    sizes.push_back(block_bytes);
  }
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
  return cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), sizes.size(), &attributes, &first, 1, stream);
}
