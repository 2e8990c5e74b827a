// Decode attention's work: how it is cut into shares, and how a warp brings its pieces into shared memory.
#pragma once

#include "decode_instructions.h"

namespace baton::decoding {

constexpr int PIECE = 16;     // tokens
constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int MAX_GROUP = 8;  // half of the tile's 16 rows; the other half stays zero

struct DecodeArguments {
  const __nv_bfloat16* q;
  int64_t q_stride;  // elements from row to row
  const uint8_t* k;  // the layer's first block
  const uint8_t* v;
  int64_t block_stride;  // bytes from block to block
  const int* indptr;
  const int* indices;
  const int* last_page;
  const int* hidden;  // [rows] tokens at the start of a row's first page that its window hides
  __nv_bfloat16* out;  // [rows, kv_heads * group * head_dim]
  float* parts;        // [blocks of threads, 2, part_floats]
  int* arrivals;       // [rows, kv_heads], zero between launches
  int rows;
  int kv_heads;
  int group;
  int block_size;
  int least_pieces;  // in a share
  float scale_log2;  // score scale, k scale and log2(e)
  float v_scale;
};

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
  int hidden;  // of them, the first ones
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
  pair.hidden = arguments.hidden[row];
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

// Pieces in shares of one size, the last one perhaps smaller: fewer shares than blocks when there is little to read.
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
    rows = position + PIECE > pair.hidden ? min(max(pair.length - position, 0), PIECE) : 0;
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

}  // namespace baton::decoding
