// Decode attention over a paged KV pool: one query row per sequence, grouped query heads, bf16 or e4m3 keys and values.
//
// The KV of all (row, KV head) pairs, laid end to end in pieces of 16 tokens, is cut into equal shares, one per block of
// threads, wherever the cuts fall. So every multiprocessor reads the same number of bytes whatever the lengths, and the
// host plans nothing: the page table's own prefix sum says where a share begins. A pair that several blocks share is
// put together by the block that finishes last, in the order of the shares, so that a result does not depend on timing.
//
// Inside a block each warp takes every fourth piece, with its own pipeline of asynchronous copies; warps meet only at
// the end of a pair. Scores and sums run on the tensor cores (m16n8k16), with the group's heads as rows of the tile.

#include <cuda_fp16.h>
#include <math.h>

#include "common.h"

namespace baton {
namespace {

constexpr int PIECE = 16;      // tokens
constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int MAX_GROUP = 8;   // half of the tile's 16 rows; the other half stays zero
constexpr float NEGATIVE = -INFINITY;

struct DecodeArguments {
  const __nv_bfloat16* q;
  int64_t q_stride;  // elements from row to row
  const uint8_t* k;  // the layer's first block
  const uint8_t* v;
  int64_t block_stride;  // bytes from block to block
  const int* indptr;
  const int* indices;
  const int* last_page;
  __nv_bfloat16* out;  // [rows, kv_heads * group * head_dim]
  float* parts;        // [blocks of threads, 2, part_floats]
  int* arrivals;       // [rows, kv_heads], zero between launches
  int rows;
  int kv_heads;
  int group;
  int block_size;
  int window;  // visible tokens, INT_MAX without a window
  int least_pieces;  // in a share
  float scale_log2;  // score scale, k scale and log2(e)
  float v_scale;
};

// ------------------------------------------------------------------------------------------------------ instructions

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes to shared memory, or 16 zeros.
__device__ __forceinline__ void copy_async(uint32_t to, const uint8_t* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&into)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_transposed(uint32_t (&into)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
               : "r"(address)
               : "memory");
}

// Adds one to what all blocks see, publishes what this block has written before, and returns the number before.
__device__ __forceinline__ int arrive(int* arrivals) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
  return before;
}

// Adds a 16 x 16 tile, of which rows 8 to 15 are zero, times a 16 x 8 tile.
template <typename Kv>
__device__ __forceinline__ void multiply(float (&sum)[4], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(float (&sum)[4], uint32_t a0, uint32_t a2, uint32_t b0,
                                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, "
               "{%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply<__nv_fp8_e4m3>(float (&sum)[4], uint32_t a0, uint32_t a2, uint32_t b0,
                                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, "
               "{%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1));
}

// Two floats as a pair of the type that the tensor cores take beside Kv.
template <typename Kv>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}

template <>
__device__ __forceinline__ uint32_t pack<__nv_fp8_e4m3>(float low, float high) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}

// Two e4m3 values, the lower byte first, as halves. Exact.
__device__ __forceinline__ uint32_t widen(uint32_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  return halves;
}

__device__ __forceinline__ uint32_t interleave(uint32_t bytes) { return __byte_perm(bytes, 0, 0x3120); }

// ------------------------------------------------------------------------------------------------------------ layout

// How one piece of K or V lies in shared memory: rows of tokens, 16-byte chunks swizzled so that eight rows' same chunk
// falls into eight different bank groups.
template <typename Kv, int DIM>
struct Layout {
  static constexpr int ROW_BYTES = DIM * static_cast<int>(sizeof(Kv));
  static constexpr int CHUNKS = ROW_BYTES / 16;
  static constexpr int PIECE_BYTES = PIECE * ROW_BYTES;
  static constexpr int STAGE_BYTES = 2 * PIECE_BYTES;
  static constexpr int STAGES = STAGE_BYTES > 4096 ? 3 : 4;  // of a warp: one in use, the others on their way
  static constexpr int COPIES = PIECE * CHUNKS / WARP;  // 16-byte copies of a lane for K, and as many for V
  static constexpr int SUMS = DIM / 8;                  // 8-wide tiles of the result

  static __device__ __forceinline__ int offset(int row, int chunk) {
    const int swizzle = CHUNKS >= 8 ? row & 7 : (row >> 1) & 3;
    return row * ROW_BYTES + (chunk ^ swizzle) * 16;
  }
};

// Part of a pair's result: the sums [group, dim], then peak and total [group, 2], padded to 16 bytes.
__host__ __device__ constexpr int part_floats(int group, int dim) { return group * dim + (2 * group + 3) / 4 * 4; }

template <typename Kv, int DIM>
constexpr int shared_bytes(int group) {
  return WARPS * Layout<Kv, DIM>::STAGES * Layout<Kv, DIM>::STAGE_BYTES +
         WARPS * part_floats(group, DIM) * static_cast<int>(sizeof(float));
}

// ------------------------------------------------------------------------------------------------------- whose turn

// A (row, KV head) pair and where it lies among all pieces.
struct Pair {
  int row;
  int head;
  int begin;  // its first piece
  int end;
  int length;  // tokens
};

__device__ __forceinline__ Pair pair_at(const DecodeArguments& arguments, int row, int head) {
  const int first = arguments.indptr[row], pages = arguments.indptr[row + 1] - first;
  const int pieces_per_page = arguments.block_size / PIECE;
  Pair pair;
  pair.row = row;
  pair.head = head;
  pair.begin = (first * arguments.kv_heads + head * pages) * pieces_per_page;
  pair.end = pair.begin + pages * pieces_per_page;
  pair.length = (pages - 1) * arguments.block_size + arguments.last_page[row];
  return pair;
}

__device__ __forceinline__ Pair pair_of(const DecodeArguments& arguments, int piece) {
  const int pieces_per_page = arguments.block_size / PIECE;
  const int page = piece / (pieces_per_page * arguments.kv_heads);
  int low = 0, high = arguments.rows - 1;  // the row with indptr[row] <= page < indptr[row + 1]
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (arguments.indptr[middle] <= page) low = middle;
    else high = middle - 1;
  }
  const int first = arguments.indptr[low], pages = arguments.indptr[low + 1] - first;
  return pair_at(arguments, low, (piece / pieces_per_page - first * arguments.kv_heads) / pages);
}

__device__ __forceinline__ Pair pair_after(const DecodeArguments& arguments, const Pair& pair) {
  return pair.head + 1 < arguments.kv_heads ? pair_at(arguments, pair.row, pair.head + 1)
                                            : pair_at(arguments, pair.row + 1, 0);
}

// All pieces in shares of one size, the last one perhaps smaller: fewer shares than blocks when there is little to read.
struct Shares {
  int pieces;
  int size;

  __device__ __forceinline__ Shares(const DecodeArguments& arguments, int blocks) {
    pieces = arguments.indptr[arguments.rows] * arguments.kv_heads * (arguments.block_size / PIECE);
    size = max(arguments.least_pieces, (pieces + blocks - 1) / blocks);
  }
  __device__ __forceinline__ int begin(int share) const { return share * size; }
  __device__ __forceinline__ int end(int share) const { return min(begin(share) + size, pieces); }
  __device__ __forceinline__ int holding(int piece) const { return piece / size; }
};

// ------------------------------------------------------------------------------------------------------------- copies

// One warp's way through a share: pieces first, first + WARPS, ..., looked up 32 at a time, one by each lane.
template <typename Kv, int DIM>
struct Feeder {
  using L = Layout<Kv, DIM>;
  const DecodeArguments& arguments;
  uint32_t stages;  // shared address of this warp's stages
  int lane;
  int next;  // the piece to copy next
  int end;
  int stage = 0;
  int looked_up = 0;  // of the 32, how many are used
  bool waited = false;
  int64_t from = 0;  // of this lane's piece: byte offset in K and V, rows to read, whether this step wrote to it
  int rows = 0;
  bool fresh = false;

  __device__ __forceinline__ void look_up() {
    const int piece = next + lane * WARPS;
    looked_up = 0;
    if (piece >= end) return;
    const Pair pair = pair_of(arguments, piece);
    const int within = piece - pair.begin, pieces_per_page = arguments.block_size / PIECE;
    const int page = within / pieces_per_page, first = (within - page * pieces_per_page) * PIECE;
    const int block = arguments.indices[arguments.indptr[pair.row] + page];
    from = block * arguments.block_stride +
           (static_cast<int64_t>(pair.head) * arguments.block_size + first) * L::ROW_BYTES;
    const int position = within * PIECE;
    rows = position + PIECE > pair.length - arguments.window ? min(max(pair.length - position, 0), PIECE) : 0;
    fresh = within * PIECE + PIECE >= pair.length;
  }

  // Only the piece with a row's newest token depends on the kernels before this one.
  __device__ __forceinline__ void wait_if(bool needed) {
    if (needed && !waited) {
      wait_for_predecessor();
      waited = true;
    }
  }

  // Starts the copies of the next piece, if there is one; commits a group either way.
  __device__ __forceinline__ void feed() {
    if (next < end) {
      const int64_t piece_from = __shfl_sync(~0u, from, looked_up);
      const int piece_rows = __shfl_sync(~0u, rows, looked_up);
      wait_if(__shfl_sync(~0u, static_cast<int>(fresh), looked_up));
      const uint32_t to = stages + stage * L::STAGE_BYTES;
#pragma unroll
      for (int copy = 0; copy < L::COPIES; ++copy) {
        const int index = copy * WARP + lane, row = index / L::CHUNKS, chunk = index % L::CHUNKS;
        copy_async(to + L::offset(row, chunk), arguments.k + piece_from + index * 16, row < piece_rows);
      }
#pragma unroll
      for (int copy = 0; copy < L::COPIES; ++copy) {
        const int index = copy * WARP + lane, row = index / L::CHUNKS, chunk = index % L::CHUNKS;
        copy_async(to + L::PIECE_BYTES + L::offset(row, chunk), arguments.v + piece_from + index * 16,
                   row < piece_rows);
      }
      next += WARPS;
      if (++looked_up == WARP) look_up();
    }
    stage = stage + 1 == L::STAGES ? 0 : stage + 1;
    commit_copies();
  }
};

// -------------------------------------------------------------------------------------------------------- arithmetic

// The query heads of one group as the left operand, and what has been summed up for them. Row g of the tile is head
// lane / 4; of it, this lane holds what the layout of m16n8k16 gives it.
template <typename Kv, int DIM>
struct Accumulator {
  using L = Layout<Kv, DIM>;
  static constexpr bool IS_FP8 = sizeof(Kv) == 1;
  uint32_t q[DIM / 16][2];
  float sums[L::SUMS][4];
  float peak;   // of the scores, in units of log2
  float total;  // of the weights, over this lane's columns

  __device__ __forceinline__ void start(const __nv_bfloat16* query, int group, int lane) {
    const int head = lane / 4, column = lane % 4;
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
      q[step][0] = q[step][1] = 0;
      if (head < group) {
        const __nv_bfloat16* at = query + head * DIM + step * 16;
        // For e4m3 each lane's four columns are neighbours; K is read in the same order.
        q[step][0] = load(at + (IS_FP8 ? column * 4 : column * 2));
        q[step][1] = load(at + (IS_FP8 ? column * 4 + 2 : column * 2 + 8));
      }
    }
#pragma unroll
    for (int tile = 0; tile < L::SUMS; ++tile) sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0.0f;
    peak = NEGATIVE;
    total = 0.0f;
  }

  static __device__ __forceinline__ uint32_t load(const __nv_bfloat16* at) {
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(at);
    if constexpr (!IS_FP8) return pair;
    return pack<Kv>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }

  // Scores of 16 keys: scores[0] are keys 0 to 7, scores[1] keys 8 to 15.
  __device__ __forceinline__ void score(float (&scores)[2][4], uint32_t keys, int lane) const {
    float odd[2][4] = {};
    const int matrix = lane / 8, row = lane % 8;
    if constexpr (!IS_FP8) {
      const int token = (matrix >> 1) * 8 + row;
#pragma unroll
      for (int step = 0; step < DIM / 16; ++step) {
        uint32_t k[4];
        load_matrices(k, keys + L::offset(token, 2 * step + (matrix & 1)));
        multiply<Kv>(step & 1 ? odd[0] : scores[0], q[step][0], q[step][1], k[0], k[1]);
        multiply<Kv>(step & 1 ? odd[1] : scores[1], q[step][0], q[step][1], k[2], k[3]);
      }
    } else {
      const int token = (matrix & 1) * 8 + row;
#pragma unroll
      for (int step = 0; step < DIM / 16; step += 2) {
        uint32_t k[4];
        load_matrices(k, keys + L::offset(token, step + (matrix >> 1)));
        multiply<Kv>(scores[0], q[step][0], q[step][1], widen(k[0]), widen(k[0] >> 16));
        multiply<Kv>(scores[1], q[step][0], q[step][1], widen(k[1]), widen(k[1] >> 16));
        multiply<Kv>(odd[0], q[step + 1][0], q[step + 1][1], widen(k[2]), widen(k[2] >> 16));
        multiply<Kv>(odd[1], q[step + 1][0], q[step + 1][1], widen(k[3]), widen(k[3] >> 16));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scores[half][0] += odd[half][0];
      scores[half][1] += odd[half][1];
    }
  }

  // Takes in one piece of keys and values; of its tokens those from `first` to before `last` are visible.
  __device__ __forceinline__ void take(uint32_t keys, int first, int last, float scale_log2, int lane) {
    float scores[2][4] = {};
    score(scores, keys, lane);
    float best = NEGATIVE;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int token = half * 8 + lane % 4 * 2 + column;
        const bool visible = token >= first && token < last;
        scores[half][column] = visible ? scores[half][column] * scale_log2 : NEGATIVE;
        best = fmaxf(best, scores[half][column]);
      }
    }
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
    const float new_peak = fmaxf(peak, best);
    const float reference = new_peak == NEGATIVE ? 0.0f : new_peak;
    const float shrink = exp2f(peak - reference);
    peak = new_peak;
    float weights[2][2];
    total *= shrink;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        weights[half][column] = exp2f(scores[half][column] - reference);
        total += weights[half][column];
      }
    }
#pragma unroll
    for (int tile = 0; tile < L::SUMS; ++tile) {
      sums[tile][0] *= shrink;
      sums[tile][1] *= shrink;
    }
    add(keys + L::PIECE_BYTES, pack<Kv>(weights[0][0], weights[0][1]), pack<Kv>(weights[1][0], weights[1][1]), lane);
  }

  __device__ __forceinline__ void add(uint32_t values, uint32_t low, uint32_t high, int lane) {
    const int matrix = lane / 8, token = (matrix & 1) * 8 + lane % 8;
#pragma unroll
    for (int step = 0; step < L::CHUNKS; step += 2) {
      uint32_t v[4];
      load_transposed(v, values + L::offset(token, step + (matrix >> 1)));
      if constexpr (!IS_FP8) {
        multiply<Kv>(sums[step], low, high, v[0], v[1]);
        multiply<Kv>(sums[step + 1], low, high, v[2], v[3]);
      } else {  // a transposed pair of bytes is two columns: tile 2c has the even ones, tile 2c + 1 the odd ones
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          const uint32_t upper = interleave(v[2 * chunk]), lower = interleave(v[2 * chunk + 1]);
          multiply<Kv>(sums[2 * (step + chunk)], low, high, widen(upper), widen(lower));
          multiply<Kv>(sums[2 * (step + chunk) + 1], low, high, widen(upper >> 16), widen(lower >> 16));
        }
      }
    }
  }

  // Writes this warp's part.
  __device__ __forceinline__ void store(float* to, int group, int lane) const {
    const int head = lane / 4, column = lane % 4;
    float whole = total;
    whole += __shfl_xor_sync(~0u, whole, 1);
    whole += __shfl_xor_sync(~0u, whole, 2);
    if (head >= group) return;
    float* row = to + head * DIM;
#pragma unroll
    for (int tile = 0; tile < L::SUMS; tile += 2) {
      if constexpr (!IS_FP8) {
        *reinterpret_cast<float2*>(row + tile * 8 + column * 2) = make_float2(sums[tile][0], sums[tile][1]);
        *reinterpret_cast<float2*>(row + tile * 8 + 8 + column * 2) = make_float2(sums[tile + 1][0], sums[tile + 1][1]);
      } else {
        *reinterpret_cast<float4*>(row + tile * 8 + column * 4) =
            make_float4(sums[tile][0], sums[tile + 1][0], sums[tile][1], sums[tile + 1][1]);
      }
    }
    if (column == 0) *reinterpret_cast<float2*>(to + group * DIM + head * 2) = make_float2(peak, whole);
  }
};

// ------------------------------------------------------------------------------------------------------ putting together

// Weighted parts of one head's result: four columns, peak and total.
struct Merged {
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float peak = NEGATIVE;
  float total = 0.0f;

  __device__ __forceinline__ void add(float4 part, float2 state) {
    const float new_peak = fmaxf(peak, state.x);
    const float reference = new_peak == NEGATIVE ? 0.0f : new_peak;
    const float old_weight = exp2f(peak - reference), weight = exp2f(state.x - reference);
    sum.x = sum.x * old_weight + part.x * weight;
    sum.y = sum.y * old_weight + part.y * weight;
    sum.z = sum.z * old_weight + part.z * weight;
    sum.w = sum.w * old_weight + part.w * weight;
    total = total * old_weight + state.y * weight;
    peak = new_peak;
  }
};

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
      merged.add(reinterpret_cast<const float4*>(from)[index], reinterpret_cast<const float2*>(from + group * DIM)[head]);
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
__global__ void __launch_bounds__(THREADS, 2) decode_attention_kernel(const __grid_constant__ DecodeArguments arguments) {
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
    const int oldest = max(pair.length - arguments.window, 0);
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
  return launch(decode_attention_kernel<Kv, DIM>, dim3(blocks), dim3(THREADS), bytes, stream, overlap, arguments);
}

template <typename Kv, int DIM>
cudaError_t prepare(int group, int* blocks) {
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
  *blocks = processors * resident;
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
}  // namespace baton

// How many blocks of threads the kernel for this shape should be launched with: as many as run at once. Must be called
// before the first launch for the shape. `kv_bytes` is 2 for bf16 and 1 for e4m3.
extern "C" int baton_decode_attention_prepare(int kv_bytes, int head_dim, int group, int* blocks) {
  using namespace baton;
  if (group < 1 || group > MAX_GROUP) return cudaErrorInvalidValue;
  if (kv_bytes == 2 && head_dim == 128) return prepare<__nv_bfloat16, 128>(group, blocks);
  if (kv_bytes == 2 && head_dim == 64) return prepare<__nv_bfloat16, 64>(group, blocks);
  if (kv_bytes == 1 && head_dim == 128) return prepare<__nv_fp8_e4m3, 128>(group, blocks);
  if (kv_bytes == 1 && head_dim == 64) return prepare<__nv_fp8_e4m3, 64>(group, blocks);
  return cudaErrorInvalidValue;
}

extern "C" int baton_decode_attention(const void* q, int64_t q_stride, const void* k, const void* v,
                                      int64_t block_stride, const int* indptr, const int* indices, const int* last_page,
                                      void* out, float* parts, int* arrivals, int rows, int kv_heads, int group,
                                      int head_dim, int block_size, int kv_bytes, int window, int least_pieces,
                                      float scale, float v_scale, int blocks, int overlap, cudaStream_t stream) {
  using namespace baton;
  const DecodeArguments arguments{static_cast<const __nv_bfloat16*>(q),
                                  q_stride,
                                  static_cast<const uint8_t*>(k),
                                  static_cast<const uint8_t*>(v),
                                  block_stride,
                                  indptr,
                                  indices,
                                  last_page,
                                  static_cast<__nv_bfloat16*>(out),
                                  parts,
                                  arrivals,
                                  rows,
                                  kv_heads,
                                  group,
                                  block_size,
                                  window,
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
  return launch(quantize_kernel, dim3(rows), dim3(256), 0, stream, Overlap::NO,
                static_cast<const __nv_bfloat16*>(from), from_stride, static_cast<__nv_fp8x2_storage_t*>(to), width);
}
