// Matrix products of 17 to 128 rows: out[rows, n] = x[rows, k] * weight[n, k]^T in bf16, or of e4m3 operands with a scale
// for every row of x and of the weights. Bound by reading the weights, once.
//
// The weights are the 64-row operand of the matrix instruction and the rows of x its columns. A tile is 64 GROUPS weight
// rows by all rows of x; its k is shared by `splits` blocks of a cluster, which add their parts in shared memory of each
// other, in one order, and each finish a share of the outputs: no workspace, no second kernel, the same bits always.
// All blocks are resident at a time and read the same number of bytes, so it does not matter where they run.
//
// In a block each of GROUPS warpgroups multiplies 64 weight rows, and one thread brings the operands to a ring of stages
// by TMA, 128 bytes of k at a time. With PAIR 2 a cluster has two tiles with the same k, and each block brings half of
// the rows of x to both: what all blocks read of x from the L2 cache is otherwise rows / (64 GROUPS) of the weights. A
// stage is given back as soon as it has been multiplied. Weights do not depend on the kernel before, so the first of
// them are under way before this kernel waits for it; and small stages leave room on the multiprocessor for a block of
// the next kernel, which keeps the memory busy while this one adds up.
#include <cuda.h>

#include "common.h"
#include "mid_rows_results.h"
#include "tma.h"
#include "wgmma.h"

namespace baton::mid_rows {
namespace {

constexpr int UNIT_BYTES = 128, STEP_BYTES = 32;  // of k in a stage, and of that in one instruction
constexpr int ALIGNMENT = 1024;

// How many blocks of such a kernel a multiprocessor holds: TWO, or ONE with a longer ring.
enum class Resident : int { ONE = 1, TWO = 2 };

template <typename Value_, int COLUMNS_, int GROUPS_, int PAIR_, Resident RESIDENT_>
struct Shape {
  using Value = Value_;
  static constexpr int COLUMNS = COLUMNS_, GROUPS = GROUPS_, PAIR = PAIR_, RESIDENT = static_cast<int>(RESIDENT_);
  static constexpr int WEIGHT_ROWS = GROUPS * GROUP_ROWS, CONSUMERS = GROUPS * GROUP_THREADS;
  static constexpr int THREADS = CONSUMERS + WARP;
  static constexpr int WEIGHT_BYTES = WEIGHT_ROWS * UNIT_BYTES, ROW_BYTES = COLUMNS * UNIT_BYTES;
  static constexpr int STAGE_BYTES = WEIGHT_BYTES + ROW_BYTES;
  static constexpr int STAGES = (RESIDENT == 2 ? 104 : 208) * 1024 / STAGE_BYTES;
  static constexpr int SHARED = STAGES * STAGE_BYTES + ALIGNMENT;
  static constexpr int UNIT = UNIT_BYTES / static_cast<int>(sizeof(Value));  // values of k in a stage
  static_assert(STAGES >= 3, "one stage is multiplied while others are under way");
  static_assert(COLUMNS * Part<WEIGHT_ROWS>::PITCH * 4 <= STAGES * STAGE_BYTES, "the parts take the stages' place");
};

// ----------------------------------------------------------------------------------------------------------- a block

// Where a block stands: which tile, which units of 128 bytes of k, and the addresses of its shared memory.
template <typename S>
struct Block {
  uint32_t stages, full, empty;
  int pair, split, first, begin, end;  // `first`: the tile's first weight row

  __device__ Block(const Product &p, const void *shared, const void *full_barriers, const void *empty_barriers)
      : stages((shared_address(shared) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT),
        full(shared_address(full_barriers)),
        empty(shared_address(empty_barriers)) {
    const int rank = cluster_rank(), units = (p.k + S::UNIT - 1) / S::UNIT;
    pair = rank % S::PAIR, split = rank / S::PAIR;
    first = (static_cast<int>(blockIdx.x) / (S::PAIR * p.splits) * S::PAIR + pair) * S::WEIGHT_ROWS;
    begin = units * split / p.splits, end = units * (split + 1) / p.splits;
  }

  __device__ uint32_t weights(int stage) const { return stages + stage * S::STAGE_BYTES; }
  __device__ uint32_t rows(int stage) const { return weights(stage) + S::WEIGHT_BYTES; }
  __device__ uint32_t full_at(int stage) const { return full + stage * 8; }
  __device__ uint32_t empty_at(int stage) const { return empty + stage * 8; }

  __device__ void make_barriers() const {
    for (int i = 0; i < S::STAGES; ++i) {
      make_barrier(full_at(i), 1);
      make_barrier(empty_at(i), S::CONSUMERS / WARP * S::PAIR);
    }
    publish_barriers();
  }

  __device__ void bring_weights(const CUtensorMap &weight, uint64_t policy, int unit, int stage) const {
    expect_bytes(full_at(stage), S::STAGE_BYTES);
    copy_tile(weights(stage), weight, unit * S::UNIT, first, full_at(stage), policy);
  }

  __device__ void bring_rows(const CUtensorMap &x, int unit, int stage) const {
    if constexpr (S::PAIR == 1) {
      copy_tile(rows(stage), x, unit * S::UNIT, 0, full_at(stage));
    } else {
      const uint16_t both = static_cast<uint16_t>(3 << split * S::PAIR);
      copy_tile_to(both, rows(stage) + pair * (S::ROW_BYTES / 2), x, unit * S::UNIT, pair * (S::COLUMNS / 2),
                   full_at(stage));
    }
  }

  // The weights that fit the ring; their rows of x follow once the kernel before has finished.
  __device__ void begin_weights(const CUtensorMap &weight, uint64_t policy) const {
    for (int i = 0; i < min(end - begin, S::STAGES); ++i) bring_weights(weight, policy, begin + i, i);
  }

  __device__ void produce(const CUtensorMap &weight, const CUtensorMap &x, uint64_t policy) const {
    for (int i = 0; i < min(end - begin, S::STAGES); ++i) bring_rows(x, begin + i, i);
    Ring<S::STAGES> at;
    for (int unit = begin + S::STAGES; unit < end; ++unit) {
      wait_for(empty_at(at.stage), at.parity);
      bring_weights(weight, policy, unit, at.stage);
      bring_rows(x, unit, at.stage);
      at.advance();
    }
  }

  // One warp no longer reads a stage, which every block of the pair writes to.
  __device__ void release(int stage) const {
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    if (lane < S::PAIR) arrive_at(empty_at(stage), split * S::PAIR + lane);
  }

  // The sums of one warpgroup's 64 weight rows over this block's k.
  __device__ __forceinline__ void consume(float (&sums)[S::COLUMNS / 2], int group) const {
    Ring<S::STAGES> at;
    int accumulate = 0;
    for (int unit = begin; unit < end; ++unit) {
      wait_for(full_at(at.stage), at.parity);
      const uint64_t mine = describe_operand(weights(at.stage) + group * GROUP_ROWS * UNIT_BYTES);
      const uint64_t columns = describe_operand(rows(at.stage));
      open_products();
#pragma unroll
      for (int step = 0; step < UNIT_BYTES / STEP_BYTES; ++step, accumulate = 1)
        multiply_tiles<typename S::Value, S::COLUMNS>(sums, mine + 2 * step, columns + 2 * step, accumulate);
      commit_products();
      wait_for_products<0>();
      release(at.stage);
      at.advance();
    }
    settle(sums);
  }
};

template <typename S>
__global__ void __launch_bounds__(S::THREADS, S::RESIDENT)
    mid_rows_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x, const Product p) {
  extern __shared__ char shared[];
  __shared__ __align__(8) uint64_t full[S::STAGES], empty[S::STAGES];
  __shared__ Terms<S::WEIGHT_ROWS, S::COLUMNS> terms;
  const Block<S> block(p, shared, full, empty);
  const int thread = static_cast<int>(threadIdx.x);
  const bool clustered = S::PAIR * p.splits > 1, copies = thread == S::CONSUMERS;
  uint64_t policy = 0;
  if (copies) {
    policy = read_once();
    block.make_barriers();
    block.begin_weights(weight, policy);
    fetch_description(x);
  }
  __syncwarp();
  if constexpr (S::PAIR == 1)
    __syncthreads();
  else
    meet_cluster();  // the other block of the pair sends to this one
  release_successor();
  if (thread >= S::CONSUMERS) {
    wait_for_predecessor();
    if (copies) block.produce(weight, x, policy);
    __syncwarp();
    if (clustered) meet_cluster(), meet_cluster();  // as often as those who multiply
    return;
  }

  terms.template load_weights<typename S::Value>(p, block.first, thread);
  wait_for_predecessor();
  terms.template load_rows<typename S::Value>(p, thread);
  const int group = thread / GROUP_THREADS;
  float sums[S::COLUMNS / 2];
  block.consume(sums, group);
  sync_threads<S::CONSUMERS>();  // all have read the stages, whose place the parts take
  leave_part<S::WEIGHT_ROWS, S::COLUMNS>(block.stages, sums, group * GROUP_ROWS);
  if (clustered)
    sync_cluster();
  else
    sync_threads<S::CONSUMERS>();
  write_share<typename S::Value, S::WEIGHT_ROWS, S::COLUMNS, S::PAIR, S::CONSUMERS>(p, terms, block.stages, block.first,
                                                                                   block.split, block.pair);
  if (clustered) meet_cluster();  // a block's shared memory must outlive what the others read there
}

// ------------------------------------------------------------------------------------------------------------ shapes

struct Variant {
  int columns, groups, pair, resident, value_bytes, shared_bytes, threads;
  void (*kernel)(CUtensorMap, CUtensorMap, Product);
};

template <typename S>
constexpr Variant variant() {
  return {S::COLUMNS, S::GROUPS, S::PAIR, S::RESIDENT, sizeof(typename S::Value), S::SHARED, S::THREADS,
          mid_rows_kernel<S>};
}

#define BATON_NARROW(VALUE, COLUMNS)                                                                           \
  variant<Shape<VALUE, COLUMNS, 1, 1, Resident::TWO>>(), variant<Shape<VALUE, COLUMNS, 2, 1, Resident::TWO>>(), \
      variant<Shape<VALUE, COLUMNS, 2, 2, Resident::TWO>>(), variant<Shape<VALUE, COLUMNS, 4, 1, Resident::ONE>>()
#define BATON_WIDE(VALUE, COLUMNS)                                                                             \
  variant<Shape<VALUE, COLUMNS, 1, 2, Resident::TWO>>(), variant<Shape<VALUE, COLUMNS, 2, 2, Resident::TWO>>(), \
      variant<Shape<VALUE, COLUMNS, 2, 2, Resident::ONE>>(), variant<Shape<VALUE, COLUMNS, 4, 1, Resident::ONE>>()

const Variant VARIANTS[] = {BATON_NARROW(bf16, 32), BATON_NARROW(bf16, 64), BATON_WIDE(bf16, 96), BATON_WIDE(bf16, 128),
                            BATON_NARROW(fp8, 32),  BATON_NARROW(fp8, 64),  BATON_WIDE(fp8, 96),  BATON_WIDE(fp8, 128)};
constexpr int VARIANT_COUNT = sizeof(VARIANTS) / sizeof(VARIANTS[0]);

#undef BATON_NARROW
#undef BATON_WIDE

cudaError_t launch_clusters(const Variant &v, int blocks, int cluster, Overlap overlap, cudaStream_t stream,
                            const CUtensorMap &weight, const CUtensorMap &x, const Product &product) {
  cudaLaunchAttribute attributes[3]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[1].val.sharedMemCarveout = static_cast<unsigned>(Division::LARGEST);
  attributes[2].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[2].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(v.threads);
  config.dynamicSmemBytes = v.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = overlap == Overlap::YES ? 3 : 2;
  return cudaLaunchKernelEx(&config, v.kernel, weight, x, product);
}

}  // namespace
}  // namespace baton::mid_rows

using namespace baton;
using namespace baton::mid_rows;

// Finds the driver's function that describes matrices, and lets the kernels have their shared memory.
extern "C" int baton_mid_rows_prepare(void **encode) {
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", encode, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  for (const Variant &v : VARIANTS) {
    const cudaError_t refused =
        cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.shared_bytes);
    if (refused != cudaSuccess) return refused;
  }
  return cudaSuccess;
}

// Variant `index`: [bytes of an operand's value, columns, groups, pair, resident]; all 0 past the last.
extern "C" int baton_mid_rows_variant(int index, int *shape) {
  const Variant v = index >= 0 && index < VARIANT_COUNT ? VARIANTS[index] : Variant{};
  const int numbers[] = {v.value_bytes, v.columns, v.groups, v.pair, v.resident};
  for (int i = 0; i < 5; ++i) shape[i] = numbers[i];
  return cudaSuccess;
}

// One product. n must be a multiple of 8 and a row of an operand one of 16 bytes; rows at most the variant's columns; the
// k of a tile is shared by `splits` blocks, at most as many as it has units of 128 bytes. The scales are read with e4m3
// operands only. All pointers are 16-byte aligned.
extern "C" int baton_mid_rows(int index, int splits, int overlap, const void *encode, const void *x, const void *weight,
                              const void *bias, const void *x_scale, const void *weight_scale, void *out, int rows,
                              int n, int k, void *stream) {
  const Variant &v = VARIANTS[index];
  const int units = (k * v.value_bytes + UNIT_BYTES - 1) / UNIT_BYTES, cluster = v.pair * splits;
  if (n % VECTOR != 0 || k * v.value_bytes % 16 != 0 || rows < 1 || rows > v.columns) return cudaErrorInvalidValue;
  if (splits < 1 || splits > units || cluster > MOST_BLOCKS) return cudaErrorInvalidValue;
  CUtensorMap weight_map, x_map;
  cudaError_t error = describe_matrix(encode, &weight_map, weight, n, k, v.groups * GROUP_ROWS, v.value_bytes);
  if (error == cudaSuccess) error = describe_matrix(encode, &x_map, x, rows, k, v.columns / v.pair, v.value_bytes);
  if (error != cudaSuccess) return error;
  const int pair_rows = v.groups * GROUP_ROWS * v.pair, clusters = (n + pair_rows - 1) / pair_rows;
  const Product product{static_cast<const bf16 *>(bias),
                        static_cast<const float *>(x_scale),
                        static_cast<const float *>(weight_scale),
                        static_cast<bf16 *>(out),
                        rows,
                        n,
                        k,
                        splits};
  return launch_clusters(v, clusters * cluster, cluster, static_cast<Overlap>(overlap),
                         static_cast<cudaStream_t>(stream), weight_map, x_map, product);
}
