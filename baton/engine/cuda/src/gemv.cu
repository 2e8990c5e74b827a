// Matrix products for few rows (1 to 16): out[rows, n] = x[rows, k] * weight[n, k]^T, bound by reading the weights.
//
// A block takes 8 * COLUMNS weight rows at a time. K_WARPS warps split k among them, and each reads its slice of 8 weight
// rows straight from memory into tensor-core fragments (mma m16n8k16 with x as the 16-row operand and the weights as the
// 8-column one): lane (g, t) of a warp holds 16 bytes of weight row g. The order of k inside a product is free, so the
// bytes that a lane loads are used as they lie, with x read in the same order. Weights do not depend on the kernel
// before, so the first of them are under way before this kernel waits for it.
#include "gemv_rows.h"

namespace baton::gemv {
namespace {

// ---------------------------------------------------------------------------------------------------------- products

// The rows g and g + 8 of x as one lane of the 16-row operand; rows that are not there are zeros.
struct Rows {
  const char *low, *high;
  bool has_low, has_high;

  __device__ uint4 read(const char *row, bool inside, int offset) const {
    return inside ? *reinterpret_cast<const uint4 *>(row + offset) : make_uint4(0, 0, 0, 0);
  }
};

__device__ __forceinline__ void multiply(float (&even)[4], float (&odd)[4], const Rows &x, int step, uint4 w, bf16) {
  const int offset = step * STEP_BYTES;
  const uint4 a = x.read(x.low, x.has_low, offset), b = x.read(x.high, x.has_high, offset);
  mma(even, a.x, b.x, a.y, b.y, w.x, w.y);
  mma(odd, a.z, b.z, a.w, b.w, w.z, w.w);
}

__device__ __forceinline__ void multiply(float (&even)[4], float (&odd)[4], const Rows &x, int step, uint4 w, fp8) {
  const unsigned words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int offset = step * 2 * STEP_BYTES + half * LOAD_BYTES;
    const uint4 a = x.read(x.low, x.has_low, offset), b = x.read(x.high, x.has_high, offset);
    const uint2 first = e4m3_to_f16(words[2 * half]), second = e4m3_to_f16(words[2 * half + 1]);
    mma_f16(even, a.x, b.x, a.y, b.y, first.x, first.y);
    mma_f16(odd, a.z, b.z, a.w, b.w, second.x, second.y);
  }
}

// --------------------------------------------------------------------------------------------------------- the kernel

// Which weight rows a block's tile holds. With SILU_MUL the warps of even columns take gate rows, those of odd columns
// the up rows that belong to them.
template <int COLUMNS>
struct Tiling {
  int n, half;
  bool paired;

  __device__ explicit Tiling(const Product &p)
      : n(p.n), half(p.n / 2), paired(p.epilogue == Epilogue::SILU_MUL) {}
  __device__ int outputs() const { return paired ? half : n; }                     // columns of `out`
  __device__ int width() const { return paired ? COLUMNS / 2 * TILE : COLUMNS * TILE; }  // of them, in one tile
  __device__ int tiles() const { return (outputs() + width() - 1) / width(); }
  __device__ int weight_row(int tile, int column, int g) const {  // -1: past the end
    const int out = tile * width() + (paired ? column / 2 : column) * TILE + g;
    if (out >= outputs()) return -1;
    return paired && column % 2 ? half + out : out;
  }
};

// What the epilogue of one output adds, loaded while the weights are on their way.
struct Addends {
  float scale, bias, up_scale, up_bias, prior;
};

__device__ __forceinline__ Addends load_addends(const Product &p, int row, int column, bool paired) {
  Addends a{1.f, 0.f, 1.f, 0.f, 0.f};
  const int up = column + p.n / 2;
  if (p.weight_scale != nullptr) {
    a.scale = __ldg(p.weight_scale + column);
    if (paired) a.up_scale = __ldg(p.weight_scale + up);
  }
  if (p.bias != nullptr) {
    a.bias = __bfloat162float(p.bias[column]);
    if (paired) a.up_bias = __bfloat162float(p.bias[up]);
  }
  if (p.epilogue == Epilogue::ADD) {
    const unsigned short *at = reinterpret_cast<const unsigned short *>(p.out) + static_cast<size_t>(row) * p.n + column;
    a.prior = __bfloat162float(__ushort_as_bfloat16(__ldcg(at)));
  }
  return a;
}

// A product is rounded to bf16, then the bias is added and the sum rounded.
__device__ __forceinline__ float round_product(const Product &p, float sum, float scale, float bias) {
  const float product = round_bf16(sum * scale);
  return p.bias == nullptr ? product : round_bf16(product + bias);
}

// One output, before its last rounding, of a product and (with SILU_MUL) that of the up row that belongs to it.
__device__ __forceinline__ float finish(const Product &p, float sum, float up, const Addends &a) {
  const float value = round_product(p, sum, a.scale, a.bias);
  if (p.epilogue == Epilogue::ADD) return value + a.prior;
  if (p.epilogue == Epilogue::STORE) return value;
  return round_bf16(value / (1.f + __expf(-value))) * round_product(p, up, a.up_scale, a.up_bias);
}

// The sum of one output over the warps that share k.
template <int K_WARPS>
__device__ __forceinline__ float add_up(const float (&sums)[K_WARPS][MAX_ROWS][TILE], int row, int g) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < K_WARPS; ++w) sum += sums[w][row][g];
  return sum;
}

template <typename Weight, int K_WARPS, int COLUMNS, int UNROLL, int MIN_BLOCKS>
__global__ void __launch_bounds__(K_WARPS *COLUMNS *WARP, MIN_BLOCKS) gemv_kernel(const Product p) {
  constexpr int THREADS = K_WARPS * COLUMNS * WARP, VALUES = Layout<Weight>::LANE_VALUES;
  static_assert(K_WARPS >= 4, "one thread for every output of a tile of 16 rows");
  extern __shared__ __align__(128) char shared[];
  __shared__ float sums[2][COLUMNS][K_WARPS][MAX_ROWS][TILE];
  __shared__ float partial[MAX_ROWS][THREADS / WARP];

  const Tiling<COLUMNS> tiling(p);
  const Cut c = cut<Weight, K_WARPS, UNROLL>(p.k);
  const int tiles = tiling.tiles(), stride = static_cast<int>(gridDim.x);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const int column = warp % COLUMNS, k_warp = warp / COLUMNS, first_step = k_warp * c.slice;
  const size_t row_bytes = static_cast<size_t>(p.k) * sizeof(Weight);

  int fetch_tile = blockIdx.x, fetch_batch = 0;
  const auto fetch = [&](uint4(&w)[UNROLL]) {
    const int row = tiling.weight_row(fetch_tile, column, g);
    const char *base = static_cast<const char *>(p.weight) + (row < 0 ? 0 : row * row_bytes) + t * LOAD_BYTES;
    const int step = fetch_batch * UNROLL;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int at = first_step + step + u;
      const bool inside = row >= 0 && step + u < c.slice && at * 4 * VALUES + t * VALUES < p.k;
      w[u] = load_weights(base + static_cast<size_t>(at) * STEP_BYTES, inside);
    }
    if (++fetch_batch == c.batches) fetch_batch = 0, fetch_tile += stride;
  };

  uint4 ping[UNROLL], pong[UNROLL];
  fetch(ping);
  char *const gain = shared + p.rows * c.pitch;
  if (p.gain != nullptr)
    for (int v = threadIdx.x; v < p.k / 8; v += THREADS) copy_async(gain + v * LOAD_BYTES, p.gain + v * 8, true);
  release_successor();
  wait_for_predecessor();

  stage_rows<Weight, THREADS>(p, shared, c.pitch, gain, partial);

  const int lane_offset = t * VALUES * static_cast<int>(sizeof(bf16));
  const Rows x{shared + g * c.pitch + lane_offset, shared + (g + 8) * c.pitch + lane_offset, g < p.rows, g + 8 < p.rows};
  // The output that this thread finishes in every tile.
  const int out_row = threadIdx.x / tiling.width(), in_tile = threadIdx.x % tiling.width();
  const int out_column = in_tile / TILE * (tiling.paired ? 2 : 1), out_g = in_tile % TILE;

  float even[4] = {}, odd[4] = {};
  int tile = blockIdx.x, batch = 0, buffer = 0;
  Addends addends{};
  // Multiplies the weights in `now`, with the following ones on their way into `then`; false after the last.
  const auto turn = [&](uint4(&now)[UNROLL], uint4(&then)[UNROLL]) {
    if (fetch_tile < tiles) fetch(then);
    const int output = tile * tiling.width() + in_tile;
    const bool mine = out_row < p.rows && output < tiling.outputs();
    if (batch == 0 && mine) addends = load_addends(p, out_row, output, tiling.paired);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) multiply(even, odd, x, first_step + batch * UNROLL + u, now[u], Weight());
    if (++batch < c.batches) return true;
    float(*const mine_sums)[TILE] = sums[buffer][column][k_warp];
    *reinterpret_cast<float2 *>(&mine_sums[g][2 * t]) = make_float2(even[0] + odd[0], even[1] + odd[1]);
    if (p.rows > 8)
      *reinterpret_cast<float2 *>(&mine_sums[g + 8][2 * t]) = make_float2(even[2] + odd[2], even[3] + odd[3]);
    __syncthreads();
    if (mine) {
      const float up = tiling.paired ? add_up(sums[buffer][(out_column + 1) % COLUMNS], out_row, out_g) : 0.f;
      const float value = finish(p, add_up(sums[buffer][out_column], out_row, out_g), up, addends);
      p.out[static_cast<size_t>(out_row) * tiling.outputs() + output] = __float2bfloat16_rn(value);
    }
    buffer ^= 1, batch = 0, tile += stride;
#pragma unroll
    for (int i = 0; i < 4; ++i) even[i] = odd[i] = 0.f;
    return tile < tiles;
  };
  while (turn(ping, pong) && turn(pong, ping)) {
  }
}

// ------------------------------------------------------------------------------------------------------------ shapes

struct Variant {
  int k_warps, columns, unroll;
  void (*kernels[2])(Product);  // bf16, e4m3
  Cut (*cuts[2])(int);
};

template <int K_WARPS, int COLUMNS, int UNROLL, int MIN_BLOCKS>
constexpr Variant variant() {
  return {K_WARPS,
          COLUMNS,
          UNROLL,
          {gemv_kernel<bf16, K_WARPS, COLUMNS, UNROLL, MIN_BLOCKS>,
           gemv_kernel<fp8, K_WARPS, COLUMNS, UNROLL, MIN_BLOCKS>},
          {cut<bf16, K_WARPS, UNROLL>, cut<fp8, K_WARPS, UNROLL>}};
}

// Two resident blocks of 256 threads with eight loads at a time in each lane, three with four, or one of 512 threads.
const Variant VARIANTS[] = {
    variant<8, 1, 8, 2>(), variant<4, 2, 8, 2>(), variant<8, 1, 4, 3>(), variant<4, 2, 4, 3>(),
    variant<8, 2, 4, 1>(), variant<4, 4, 4, 1>(), variant<16, 1, 4, 1>(),
};
constexpr int VARIANT_COUNT = sizeof(VARIANTS) / sizeof(VARIANTS[0]);

int dynamic_shared(const Variant &v, int e4m3, int rows, int k, bool norm) {
  return rows * v.cuts[e4m3](k).pitch + (norm ? k * static_cast<int>(sizeof(bf16)) : 0);
}

// Dynamic shared memory that `kernel` may have; -1 when the device does not tell.
int shared_limit(void (*kernel)(Product)) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return -1;
  return MAX_SHARED - static_cast<int>(attributes.sharedSizeBytes);
}

}  // namespace
}  // namespace baton::gemv

using namespace baton;
using namespace baton::gemv;

// Lets the kernels have the shared memory of a whole multiprocessor. Once for a device, before the first product.
extern "C" int baton_gemv_prepare() {
  for (const Variant &v : VARIANTS)
    for (auto kernel : v.kernels) {
      const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit(kernel));
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

// The shape of variant `index`: [k_warps, columns, unroll]; k_warps is 0 past the last.
extern "C" int baton_gemv_variant(int index, int *shape) {
  const bool known = index >= 0 && index < VARIANT_COUNT;
  shape[0] = known ? VARIANTS[index].k_warps : 0;
  shape[1] = known ? VARIANTS[index].columns : 0;
  shape[2] = known ? VARIANTS[index].unroll : 0;
  return cudaSuccess;
}

// How many blocks of a variant run on one multiprocessor at a time with such rows; 0 when not even one fits.
extern "C" int baton_gemv_occupancy(int index, int e4m3, int rows, int k, int norm, int *blocks) {
  const Variant &v = VARIANTS[index];
  const int bytes = dynamic_shared(v, e4m3, rows, k, norm != 0);
  *blocks = 0;
  if (rows < 1 || rows > MAX_ROWS || bytes > shared_limit(v.kernels[e4m3])) return cudaSuccess;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, v.kernels[e4m3], v.k_warps * v.columns * WARP, bytes);
}

// One product in at most `blocks` blocks. k must be a multiple of 8 (bf16) or 16 (e4m3); all pointers 16-byte aligned.
extern "C" int baton_gemv(int index, int blocks, int overlap, int e4m3, int epilogue, const void *x, const void *gain,
                          float eps, const void *weight, const void *weight_scale, const void *bias, void *out,
                          int rows, int n, int k, void *stream) {
  const Variant &v = VARIANTS[index];
  const Epilogue then = static_cast<Epilogue>(epilogue);
  const bool paired = then == Epilogue::SILU_MUL;
  if (k % (e4m3 ? 16 : 8) != 0 || rows > MAX_ROWS || (paired && (v.columns % 2 != 0 || n % 2 != 0)))
    return cudaErrorInvalidValue;
  const int width = (paired ? v.columns / 2 : v.columns) * TILE, outputs = paired ? n / 2 : n;
  const int tiles = (outputs + width - 1) / width;
  const Product product{static_cast<const bf16 *>(x),
                        static_cast<const bf16 *>(gain),
                        weight,
                        static_cast<const float *>(weight_scale),
                        static_cast<const bf16 *>(bias),
                        static_cast<bf16 *>(out),
                        eps,
                        rows,
                        n,
                        k,
                        then};
  return launch_divided(division(rows), v.kernels[e4m3], dim3(tiles < blocks ? tiles : blocks), dim3(v.k_warps * v.columns * WARP),
                        dynamic_shared(v, e4m3, rows, k, gain != nullptr), static_cast<cudaStream_t>(stream),
                        static_cast<Overlap>(overlap), product);
}
