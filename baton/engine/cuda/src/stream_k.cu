// Matrix products of 17 to some hundred rows: out[rows, n] = x[rows, k] * weight[n, k]^T in bf16, or of e4m3 operands
// with a scale for every row of x and of the weights.
//
// The weights are the 128-row operand, the rows of x the columns of a tile, so the weights are read once. All tiles times
// all steps of k form one line of work that is cut into equal pieces, one for each cluster of blocks: every
// multiprocessor streams the same number of bytes, however many tiles there are. A cluster that begins in the middle of
// a tile leaves its part of the sums in a workspace, and the cluster that began the tile adds the parts in their order.
//
// In a block two warpgroups multiply 64 weight rows each, and one thread brings the tiles to shared memory by TMA. The two
// blocks of a cluster have different weights and the same rows: each brings half of the rows to both. Weights do not
// depend on the kernel before, so the first of them are under way before this kernel waits for it.
#include <cuda.h>

#include "common.h"
#include "shared_memory.h"
#include "stream_k_results.h"
#include "tma.h"
#include "wgmma.h"
#include "wgmma_e4m3.h"

namespace baton {
namespace {

using fp8 = __nv_fp8_e4m3;

constexpr int TILE_WEIGHTS = 128, GROUP_WEIGHTS = 64;
constexpr int TILE_K_BYTES = 128, STEP_BYTES = 32;  // of k in a stage, and of that in one instruction
constexpr int WEIGHT_BYTES = TILE_WEIGHTS * TILE_K_BYTES;
constexpr int ALIGNMENT = 1024, CONSUMERS = 2 * GROUP_THREADS, CONSUMER_WARPS = CONSUMERS / WARP;

// Small tiles leave room on the multiprocessor for a block of the next kernel, which brings its first weights meanwhile.
// Large ones need all its registers: the thread that copies gives its own away.
template <int COLUMNS>
struct Stage {
  static constexpr bool SMALL = COLUMNS <= 64;
  static constexpr int ROW_BYTES = COLUMNS * TILE_K_BYTES, BYTES = WEIGHT_BYTES + ROW_BYTES;
  static constexpr int COUNT = (SMALL ? 104 : 200) * 1024 / BYTES;
  static constexpr int SHARED = COUNT * BYTES + ALIGNMENT;
  static constexpr int THREADS = CONSUMERS + (SMALL ? WARP : GROUP_THREADS);
};

// -------------------------------------------------------------------------------------------------------------- work

// The line of work: tile after tile, and in each tile one unit for every `tile_k` of k.
struct Line {
  int units_per_tile, row_tiles, parts, tile_k;
  long long units;

  __device__ int begin(int part) const { return static_cast<int>(units * part / parts); }
};

template <typename Value, int COLUMNS, int CLUSTER>
__device__ Line line_of(const Product &p) {
  constexpr int TILE_K = TILE_K_BYTES / static_cast<int>(sizeof(Value));
  const int row_tiles = (p.rows + COLUMNS - 1) / COLUMNS, weights = TILE_WEIGHTS * CLUSTER;
  const int units_per_tile = (p.k + TILE_K - 1) / TILE_K;
  const long long tiles = static_cast<long long>((p.n + weights - 1) / weights) * row_tiles;
  return {units_per_tile, row_tiles, static_cast<int>(gridDim.x) / CLUSTER, TILE_K,
          tiles * units_per_tile};
}

template <int COLUMNS, int CLUSTER>
struct Block {
  using S = Stage<COLUMNS>;
  uint32_t stages, full, empty;  // shared-memory addresses
  int rank;

  __device__ uint32_t weights(int stage) const { return stages + stage * S::BYTES; }
  __device__ uint32_t rows(int stage) const { return weights(stage) + WEIGHT_BYTES; }
  __device__ uint32_t full_at(int stage) const { return full + stage * 8; }
  __device__ uint32_t empty_at(int stage) const { return empty + stage * 8; }

  __device__ void bring_weights(const CUtensorMap &weight, const Line &line, int unit, int stage) const {
    const int tile = unit / line.units_per_tile, column = unit % line.units_per_tile * line.tile_k;
    expect_bytes(full_at(stage), S::BYTES);
    copy_tile(weights(stage), weight, column, (tile / line.row_tiles * CLUSTER + rank) * TILE_WEIGHTS, full_at(stage));
  }

  __device__ void bring_rows(const CUtensorMap &x, const Line &line, int unit, int stage) const {
    const int tile = unit / line.units_per_tile, column = unit % line.units_per_tile * line.tile_k;
    const int row = tile % line.row_tiles * COLUMNS + rank * (COLUMNS / CLUSTER);
    const uint32_t to = rows(stage) + rank * (S::ROW_BYTES / CLUSTER);
    if (CLUSTER == 2)
      copy_tile_to_both(to, x, column, row, full_at(stage));
    else
      copy_tile(to, x, column, row, full_at(stage));
  }

  // One thread brings the units [begin, end).
  __device__ void produce(const CUtensorMap &weight, const CUtensorMap &x, const Line &line, int begin, int end) const {
    const int early = min(end - begin, S::COUNT);
    for (int i = 0; i < early; ++i) bring_weights(weight, line, begin + i, i);
    wait_for_predecessor();
    for (int i = 0; i < early; ++i) bring_rows(x, line, begin + i, i);
    Ring<S::COUNT> at;
    for (int unit = begin + S::COUNT; unit < end; ++unit) {
      wait_for(empty_at(at.stage), at.parity);
      bring_weights(weight, line, unit, at.stage);
      bring_rows(x, line, unit, at.stage);
      at.advance();
    }
  }

  // One warp no longer reads a stage, which every block of the cluster writes to.
  __device__ void release(int stage) const {
    const int lane = threadIdx.x % WARP;
    if (lane < CLUSTER) arrive_at(empty_at(stage), lane);
  }
};

// --------------------------------------------------------------------------------------------------------- the kernel

template <typename Value, int COLUMNS>
__device__ __forceinline__ void multiply(float (&sums)[COLUMNS / 2], uint64_t weights, uint64_t rows, int accumulate) {
  if constexpr (sizeof(Value) == 1)
    multiply_e4m3_tiles<COLUMNS>(sums, weights, rows, accumulate);
  else
    multiply_tiles<COLUMNS>(sums, weights, rows, accumulate);
}

// Multiplies the units [begin, end) tile by tile: one warpgroup's 64 weight rows of each.
template <typename Value, int COLUMNS, int CLUSTER>
__device__ void consume(const Product &p, const Block<COLUMNS, CLUSTER> &block, const Line &line, int part, int group) {
  Ring<Stage<COLUMNS>::COUNT> at;
  const int end = line.begin(part + 1);
  for (int unit = line.begin(part); unit < end;) {
    const int tile = unit / line.units_per_tile, tile_end = (tile + 1) * line.units_per_tile;
    const bool begins = unit == tile * line.units_per_tile;
    const int last = min(end, tile_end);
    float sums[COLUMNS / 2];
    int accumulate = 0, previous = -1;
    for (; unit < last; ++unit) {
      wait_for(block.full_at(at.stage), at.parity);
      const uint64_t weights = describe_operand(block.weights(at.stage) + group * GROUP_WEIGHTS * TILE_K_BYTES);
      const uint64_t rows = describe_operand(block.rows(at.stage));
      open_products();
#pragma unroll
      for (int k = 0; k < TILE_K_BYTES / STEP_BYTES; ++k, accumulate = 1)
        multiply<Value, COLUMNS>(sums, weights + 2 * k, rows + 2 * k, accumulate);
      commit_products();
      wait_for_products<1>();
      if (previous >= 0) block.release(previous);
      previous = at.stage;
      at.advance();
    }
    wait_for_products<0>();
    settle<COLUMNS>(sums);
    block.release(previous);
    const int slot = (part * CLUSTER + block.rank) * 2 + group, step = CLUSTER * 2;
    if (!begins) {
      leave_part<COLUMNS>(p, sums, slot, group);
      continue;
    }
    int others = 0;
    while (part + 1 + others < line.parts && line.begin(part + 1 + others) < tile_end) ++others;
    if (others > 0) wait_for_parts(p, slot + step, step, others, group);
    for (int i = 1; i <= others; ++i) take_part<COLUMNS>(p, sums, slot + i * step);
    const int weight_row = (tile / line.row_tiles * CLUSTER + block.rank) * TILE_WEIGHTS + group * GROUP_WEIGHTS;
    const int row = tile % line.row_tiles * COLUMNS;
    if constexpr (sizeof(Value) == 1) scale_tile<COLUMNS>(p, sums, weight_row, row);
    write_tile<COLUMNS>(p, sums, weight_row, row);
  }
}

template <typename Value, int COLUMNS, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(Stage<COLUMNS>::THREADS, Stage<COLUMNS>::SMALL ? 2 : 1)
    stream_k_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x, const Product p) {
  using S = Stage<COLUMNS>;
  extern __shared__ char shared[];
  __shared__ __align__(8) uint64_t full[S::COUNT], empty[S::COUNT];
  const uint32_t stages = (shared_address(shared) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  const Block<COLUMNS, CLUSTER> block{stages, shared_address(full), shared_address(empty),
                                      CLUSTER == 1 ? 0 : cluster_rank()};
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::COUNT; ++i) {
      make_barrier(block.full_at(i), 1);
      make_barrier(block.empty_at(i), CONSUMER_WARPS * CLUSTER);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (CLUSTER == 1)
    __syncthreads();
  else
    sync_cluster();
  release_successor();

  const Line line = line_of<Value, COLUMNS, CLUSTER>(p);
  const int part = static_cast<int>(blockIdx.x) / CLUSTER, group = static_cast<int>(threadIdx.x) / GROUP_THREADS;
  if (threadIdx.x >= CONSUMERS) {
    if constexpr (!S::SMALL) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == CONSUMERS) block.produce(weight, x, line, line.begin(part), line.begin(part + 1));
  } else {
    if constexpr (!S::SMALL) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    wait_for_predecessor();
    consume<Value, COLUMNS, CLUSTER>(p, block, line, part, group);
  }
  __syncwarp();
  if (CLUSTER > 1) sync_cluster();  // a block's shared memory must outlive what the other sends to it
}

// ------------------------------------------------------------------------------------------------------------- launch

struct Variant {
  int columns, cluster, value_bytes, shared_bytes, threads;
  void (*kernel)(CUtensorMap, CUtensorMap, Product);
};

template <typename Value, int COLUMNS, int CLUSTER>
constexpr Variant variant() {
  using S = Stage<COLUMNS>;
  return {COLUMNS, CLUSTER, sizeof(Value), S::SHARED, S::THREADS, stream_k_kernel<Value, COLUMNS, CLUSTER>};
}

const Variant VARIANTS[] = {
    variant<bf16, 32, 1>(),  variant<bf16, 32, 2>(),  variant<bf16, 64, 1>(),  variant<bf16, 64, 2>(),
    variant<bf16, 128, 1>(), variant<bf16, 128, 2>(), variant<bf16, 192, 1>(), variant<bf16, 192, 2>(),
    variant<bf16, 256, 1>(), variant<bf16, 256, 2>(), variant<fp8, 32, 1>(),   variant<fp8, 64, 1>(),
    variant<fp8, 64, 2>(),   variant<fp8, 128, 1>(),  variant<fp8, 128, 2>(),  variant<fp8, 256, 2>()};
constexpr int VARIANT_COUNT = sizeof(VARIANTS) / sizeof(VARIANTS[0]);

}  // namespace
}  // namespace baton

using namespace baton;

// Finds the driver's function that describes matrices, and lets the kernels have their shared memory.
extern "C" int baton_stream_k_prepare(void **encode) {
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", encode, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  for (const Variant &v : VARIANTS) {
    const cudaError_t refused = allow_shared(v.kernel, v.shared_bytes);
    if (refused != cudaSuccess) return refused;
  }
  return cudaSuccess;
}

// The shape of variant `index`: [columns, cluster, bytes of an operand's value]; columns is 0 past the last.
extern "C" int baton_stream_k_variant(int index, int *shape) {
  const bool known = index >= 0 && index < VARIANT_COUNT;
  shape[0] = known ? VARIANTS[index].columns : 0;
  shape[1] = known ? VARIANTS[index].cluster : 0;
  shape[2] = known ? VARIANTS[index].value_bytes : 0;
  return cudaSuccess;
}

// How many blocks of variant `index` to launch: one a multiprocessor, as far as all of their clusters fit at a time.
extern "C" int baton_stream_k_blocks(int index, int *blocks) {
  const Variant &v = VARIANTS[index];
  int device, processors, clusters;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(v.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(processors / v.cluster * v.cluster);
  config.blockDim = dim3(v.threads);
  config.dynamicSmemBytes = v.shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  error = cudaOccupancyMaxActiveClusters(&clusters, v.kernel, &config);
  const int wanted = processors / v.cluster;
  *blocks = (clusters < wanted ? clusters : wanted) * v.cluster;
  return error;
}

// One product in `blocks` blocks, which must all fit on the device at a time. n must be a multiple of 8, k
// one of 16 bytes. The scales are read with e4m3 operands only. `parts` holds blocks * 2 * 64 * columns floats, `ready`
// blocks * 2 zeros.
extern "C" int baton_stream_k(int index, int blocks, int overlap, const void *encode, const void *x, const void *weight,
                              const void *bias, const void *x_scale, const void *weight_scale, void *out, void *parts,
                              void *ready, int rows, int n, int k, void *stream) {
  const Variant &v = VARIANTS[index];
  if (n % 8 != 0 || k * v.value_bytes % 16 != 0 || rows < 1) return cudaErrorInvalidValue;
  const int tile_k = TILE_K_BYTES / v.value_bytes;
  CUtensorMap weight_map, x_map;
  cudaError_t error = describe_matrix(encode, &weight_map, weight, n, k, TILE_WEIGHTS, v.value_bytes);
  if (error == cudaSuccess)
    error = describe_matrix(encode, &x_map, x, rows, k, v.columns / v.cluster, v.value_bytes);
  if (error != cudaSuccess) return error;
  const int64_t weights = TILE_WEIGHTS * v.cluster, tiles = (n + weights - 1) / weights;
  const int64_t units = tiles * ((rows + v.columns - 1) / v.columns) * ((k + tile_k - 1) / tile_k);
  const int64_t clusters = units < blocks / v.cluster ? units : blocks / v.cluster;  // each has something to do
  const Product product{static_cast<const bf16 *>(bias),
                        static_cast<const float *>(x_scale),
                        static_cast<const float *>(weight_scale),
                        static_cast<bf16 *>(out),
                        static_cast<float4 *>(parts),
                        static_cast<int *>(ready),
                        rows,
                        n,
                        k};
  return launch(v.kernel, dim3(static_cast<unsigned>(clusters * v.cluster)), dim3(v.threads), v.shared_bytes,
                static_cast<cudaStream_t>(stream), static_cast<Overlap>(overlap), weight_map, x_map, product);
}
