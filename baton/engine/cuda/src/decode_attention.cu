// Decode attention over a paged KV pool: one query row per sequence, grouped query heads, bf16 or e4m3 keys and values.
//
// The KV of all (row, KV head) pairs, laid end to end in pieces of 16 tokens, is cut into equal shares, one per block
// of threads, wherever the cuts fall. So every multiprocessor reads the same number of bytes whatever the lengths, and
// the host plans nothing: the page table's own prefix sum says where a share begins. A pair that several blocks share
// is put together by the block that finishes last, in the order of the shares, so that no result depends on timing.
// Of a row with a window the table names the pages in which it sees something; `hidden` counts what it does not see of
// the first one.
//
// Inside a block each warp takes every fourth piece, with its own pipeline of asynchronous copies; warps meet only at
// the end of a pair. Scores and sums run on the tensor cores (m16n8k16), with the group's heads as rows of the tile.

#include "decode_softmax.h"

namespace baton::decoding {
namespace {

__device__ __forceinline__ void write_result(const DecodeArguments& arguments, const Pair& pair, int index,
                                             const Merged& merged, int dim) {
  const float factor = arguments.v_scale / merged.total;
  __nv_bfloat16* out = arguments.out +
                       (static_cast<int64_t>(pair.row) * arguments.kv_heads + pair.head) * arguments.group * dim +
                       index * 4;
  uint2 packed;
  packed.x = pack<__nv_bfloat16>(merged.sum.x * factor, merged.sum.y * factor);
  packed.y = pack<__nv_bfloat16>(merged.sum.z * factor, merged.sum.w * factor);
  *reinterpret_cast<uint2*>(out) = packed;
}

constexpr int AT_ONCE = 8;  // parts whose loads are in flight together

// The last block to arrive at a shared pair adds up the parts in the order of the shares.
template <int DIM>
__device__ __forceinline__ void combine(const DecodeArguments& arguments, const Shares& shares, const Pair& pair) {
  const int group = arguments.group, stride = part_floats(group, DIM);
  const int first = shares.holding(pair.begin), last = shares.holding(pair.end - 1);
  const int first_slot = 2 * first + (shares.begin(first) == pair.begin ? 0 : 1);
  for (int index = threadIdx.x; index < group * DIM / 4; index += THREADS) {
    const int head = index / (DIM / 4);
    Merged merged;
    for (int next = first; next <= last; next += AT_ONCE) {
      float4 sums[AT_ONCE];
      float2 states[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int share = min(next + i, last);
        const float* part = arguments.parts + static_cast<int64_t>(share == first ? first_slot : 2 * share) * stride;
        sums[i] = __ldcg(reinterpret_cast<const float4*>(part) + index);
        states[i] = __ldcg(reinterpret_cast<const float2*>(part + group * DIM) + head);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (next + i <= last) merged.add(sums[i], states[i]);
      }
    }
    write_result(arguments, pair, index, merged, DIM);
  }
}

// Merges the warps' sums. A pair that this block read alone is done; else its part goes to memory.
template <int DIM>
__device__ __forceinline__ void finish(const DecodeArguments& arguments, const Shares& shares, const Pair& pair,
                                       int share, const float* sums) {
  const int group = arguments.group, stride = part_floats(group, DIM);
  const int begin = shares.begin(share);
  const bool whole = begin <= pair.begin && pair.end <= shares.end(share);
  float* part = arguments.parts + static_cast<int64_t>(2 * share + (pair.begin > begin ? 1 : 0)) * stride;
  for (int index = threadIdx.x; index < group * DIM / 4; index += THREADS) {
    const int head = index / (DIM / 4);
    Merged merged;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const float* from = sums + warp * stride;
      merged.add(reinterpret_cast<const float4*>(from)[index],
                 reinterpret_cast<const float2*>(from + group * DIM)[head]);
    }
    if (whole) {
      write_result(arguments, pair, index, merged, DIM);
      continue;
    }
    reinterpret_cast<float4*>(part)[index] = merged.sum;
    if (index % (DIM / 4) == 0) {
      reinterpret_cast<float2*>(part + group * DIM)[head] = make_float2(merged.peak, merged.total);
    }
  }
  if (whole) return;
  __syncthreads();
  __shared__ int is_last;
  if (threadIdx.x == 0) {
    int* arrivals = arguments.arrivals + pair.row * arguments.kv_heads + pair.head;
    const int others = shares.holding(pair.end - 1) - shares.holding(pair.begin);
    is_last = arrive(arrivals) == others;  // the barrier before makes the other threads' writes this one's to publish
    if (is_last) *arrivals = 0;
  }
  __syncthreads();
  if (is_last) combine<DIM>(arguments, shares, pair);
}

// ------------------------------------------------------------------------------------------------------------- kernel

template <typename Kv, int DIM>
__global__ void __launch_bounds__(THREADS, 2)
    decode_attention_kernel(const __grid_constant__ DecodeArguments arguments) {
  using L = Layout<Kv, DIM>;
  extern __shared__ __align__(128) uint8_t shared[];
  release_successor();
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, share = blockIdx.x;
  const Shares shares(arguments, gridDim.x);
  const int begin = shares.begin(share), end = shares.end(share);
  if (begin >= shares.pieces) {
    wait_for_predecessor();
    return;
  }
  const uint32_t stages = shared_address(shared) + warp * L::STAGES * L::STAGE_BYTES;
  float* sums = reinterpret_cast<float*>(shared + WARPS * L::STAGES * L::STAGE_BYTES);
  Feeder<Kv, DIM> feeder{arguments, stages, lane, begin + warp, end};
  feeder.look_up();
#pragma unroll
  for (int ahead = 0; ahead < L::STAGES - 1; ++ahead) feeder.feed();
  feeder.wait_if(true);

  int piece = begin + warp, stage = 0;
  Pair pair = pair_of(arguments, begin);
  for (;;) {
    Accumulator<Kv, DIM> accumulator;
    accumulator.start(
        arguments.q + pair.row * arguments.q_stride + pair.head * arguments.group * DIM, arguments.group, lane);
    const int oldest = pair.hidden;
    for (const int stop = min(pair.end, end); piece < stop; piece += WARPS) {
      feeder.feed();
      wait_for_copies<L::STAGES - 1>();
      __syncwarp();
      const int position = (piece - pair.begin) * PIECE;
      if (position < pair.length && position + PIECE > oldest) {
        accumulator.take(stages + stage * L::STAGE_BYTES, oldest - position, pair.length - position,
                         arguments.scale_log2, lane);
      }
      __syncwarp();
      stage = stage + 1 == L::STAGES ? 0 : stage + 1;
    }
    accumulator.store(sums + warp * part_floats(arguments.group, DIM), arguments.group, lane);
    __syncthreads();
    finish<DIM>(arguments, shares, pair, share, sums);
    if (pair.end >= end) break;
    __syncthreads();
    pair = pair_after(arguments, pair);
  }
}

template <typename Kv, int DIM>
cudaError_t run(const DecodeArguments& arguments, int blocks, cudaStream_t stream, Overlap overlap) {
  const int bytes = shared_bytes<Kv, DIM>(arguments.group);
  return launch_divided(division(arguments.rows), decode_attention_kernel<Kv, DIM>, dim3(blocks), dim3(THREADS), bytes,
                        stream, overlap, arguments);
}

template <typename Kv, int DIM>
cudaError_t prepare(int group, int rows, int* blocks) {
  int device = 0, processors = 0, resident = 0;
  const int bytes = shared_bytes<Kv, DIM>(group);
  const auto kernel = decode_attention_kernel<Kv, DIM>;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess) status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, THREADS, bytes);
  }
  *blocks = processors * (division(rows) == Division::LARGEST ? resident : 1);
  return status;
}

__global__ void quantize_kernel(const __nv_bfloat16* from, int64_t from_stride, __nv_fp8x2_storage_t* to, int width) {
  const __nv_bfloat16* row = from + blockIdx.x * from_stride;
  __nv_fp8x2_storage_t* target = to + static_cast<int64_t>(blockIdx.x) * width / 2;
  for (int index = threadIdx.x; index < width / 2; index += blockDim.x) {
    const float2 pair = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(row)[index]);
    target[index] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
  }
}

}  // namespace
}  // namespace baton::decoding

// How many blocks of threads the kernel for this shape should be launched with: as many as run at once. Must be called
// before the first launch for the shape. `kv_bytes` is 2 for bf16 and 1 for e4m3.
extern "C" int baton_decode_attention_prepare(int kv_bytes, int head_dim, int group, int rows, int* blocks) {
  using namespace baton;
  using namespace baton::decoding;
  if (group < 1 || group > MAX_GROUP) return cudaErrorInvalidValue;
  if (kv_bytes == 2 && head_dim == 128) return prepare<__nv_bfloat16, 128>(group, rows, blocks);
  if (kv_bytes == 2 && head_dim == 64) return prepare<__nv_bfloat16, 64>(group, rows, blocks);
  if (kv_bytes == 1 && head_dim == 128) return prepare<__nv_fp8_e4m3, 128>(group, rows, blocks);
  if (kv_bytes == 1 && head_dim == 64) return prepare<__nv_fp8_e4m3, 64>(group, rows, blocks);
  return cudaErrorInvalidValue;
}

extern "C" int baton_decode_attention(const void* q, int64_t q_stride, const void* k, const void* v,
                                      int64_t block_stride, const int* indptr, const int* indices, const int* last_page,
                                      const int* hidden, void* out, float* parts, int* arrivals, int rows, int kv_heads,
                                      int group, int head_dim, int block_size, int kv_bytes, int least_pieces,
                                      float scale, float v_scale, int blocks, int overlap, cudaStream_t stream) {
  using namespace baton;
  using namespace baton::decoding;
  const DecodeArguments arguments{static_cast<const __nv_bfloat16*>(q),
                                  q_stride,
                                  static_cast<const uint8_t*>(k),
                                  static_cast<const uint8_t*>(v),
                                  block_stride,
                                  indptr,
                                  indices,
                                  last_page,
                                  hidden,
                                  static_cast<__nv_bfloat16*>(out),
                                  parts,
                                  arrivals,
                                  rows,
                                  kv_heads,
                                  group,
                                  block_size,
                                  least_pieces,
                                  scale * 1.4426950408889634f,
                                  v_scale};
  const Overlap how = overlap ? Overlap::YES : Overlap::NO;
  if (kv_bytes == 2 && head_dim == 128) return run<__nv_bfloat16, 128>(arguments, blocks, stream, how);
  if (kv_bytes == 2 && head_dim == 64) return run<__nv_bfloat16, 64>(arguments, blocks, stream, how);
  if (kv_bytes == 1 && head_dim == 128) return run<__nv_fp8_e4m3, 128>(arguments, blocks, stream, how);
  if (kv_bytes == 1 && head_dim == 64) return run<__nv_fp8_e4m3, 64>(arguments, blocks, stream, how);
  return cudaErrorInvalidValue;
}

// bf16 rows to e4m3, contiguous; what is too large becomes the largest finite value. `width` is even.
extern "C" int baton_quantize_rows(const void* from, int64_t from_stride, void* to, int rows, int width,
                                   cudaStream_t stream) {
  using namespace baton;
  using namespace baton::decoding;
  if (rows == 0) return cudaSuccess;
  return launch(quantize_kernel, dim3(rows), dim3(256), 0, stream, Overlap::NO,
                static_cast<const __nv_bfloat16*>(from), from_stride, static_cast<__nv_fp8x2_storage_t*>(to), width);
}
