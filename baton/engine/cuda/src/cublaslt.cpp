// Matrix products by cublasLt: row-major out[m, n] = x[m, k] * weight[n, k]^T in bf16, or of e4m3 operands with a scale
// for every row of x and every row of the weights. cublasLt sees column-major matrices, so the weights are its A
// (transposed), x its B and out its D. A plan holds what does not change between calls of one (n, k, kind, bias).
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <string.h>

#include <new>
#include <vector>

namespace {

enum class Kind : int { BF16 = 0, E4M3 = 1 };

struct Plan {
  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t product;
  Kind kind;
  bool bias;
  int n, k;
};

// What cublasLt says, in the convention of the exported functions.
int status(cublasStatus_t code) { return -static_cast<int>(code); }

template <typename Value>
cublasStatus_t set(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute, Value value) {
  return cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof(value));
}

template <typename Value>
cublasStatus_t set(cublasLtMatmulAlgo_t *algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute, Value value) {
  return cublasLtMatmulAlgoConfigSetAttribute(algorithm, attribute, &value, sizeof(value));
}

cublasStatus_t describe(Plan *plan) {
  cublasStatus_t code = cublasLtMatmulDescCreate(&plan->product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  if (code != CUBLAS_STATUS_SUCCESS) return code;
  code = set(plan->product, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  if (code == CUBLAS_STATUS_SUCCESS && plan->bias)
    code = set(plan->product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
  if (code == CUBLAS_STATUS_SUCCESS && plan->bias)
    code = set(plan->product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF);
  if (plan->kind == Kind::BF16) return code;
  const cublasLtMatmulMatrixScale_t by_row = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
  if (code == CUBLAS_STATUS_SUCCESS) code = set(plan->product, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, by_row);
  if (code == CUBLAS_STATUS_SUCCESS) code = set(plan->product, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, by_row);
  if (code == CUBLAS_STATUS_SUCCESS)
    code = set(plan->product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(1));
  return code;
}

// Points the product at this call's bias and scales.
cublasStatus_t aim(const Plan &plan, const void *bias, const void *x_scale, const void *weight_scale) {
  cublasStatus_t code = CUBLAS_STATUS_SUCCESS;
  if (plan.bias) code = set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  if (plan.kind == Kind::BF16 || code != CUBLAS_STATUS_SUCCESS) return code;
  code = set(plan.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, weight_scale);
  if (code != CUBLAS_STATUS_SUCCESS) return code;
  return set(plan.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x_scale);
}

// The three matrices for m rows; plain values, nothing to free.
struct Layouts {
  cublasLtMatrixLayoutOpaque_t weight, x, out;

  cublasStatus_t make(const Plan &plan, int m) {
    const cudaDataType_t type = plan.kind == Kind::BF16 ? CUDA_R_16BF : CUDA_R_8F_E4M3;
    cublasStatus_t code = cublasLtMatrixLayoutInit(&weight, type, plan.k, plan.n, plan.k);
    if (code == CUBLAS_STATUS_SUCCESS) code = cublasLtMatrixLayoutInit(&x, type, plan.k, m, plan.k);
    if (code == CUBLAS_STATUS_SUCCESS) code = cublasLtMatrixLayoutInit(&out, CUDA_R_16BF, plan.n, m, plan.n);
    return code;
  }
};

// Collects different algorithms that cublasLt accepts for one product.
class Candidates {
 public:
  Candidates(const Plan &plan, Layouts *layouts, size_t workspace_bytes, size_t capacity)
      : plan_(plan), layouts_(layouts), workspace_bytes_(workspace_bytes), capacity_(capacity) {}

  void offer(const cublasLtMatmulAlgo_t &algorithm) {
    cublasLtMatmulHeuristicResult_t result{};
    if (found_.size() >= capacity_ || known(algorithm)) return;
    const cublasStatus_t code = cublasLtMatmulAlgoCheck(plan_.handle, plan_.product, &layouts_->weight, &layouts_->x,
                                                        &layouts_->out, &layouts_->out, &algorithm, &result);
    if (code == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= workspace_bytes_) found_.push_back(algorithm);
  }

  // The algorithm with k split, and with other clusters than cublasLt would take.
  void offer_variations(const cublasLtMatmulAlgo_t &algorithm) {
    for (int parts : {2, 3, 4, 6, 8}) {
      cublasLtMatmulAlgo_t split = algorithm;
      const uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
      if (set(&split, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, parts) == CUBLAS_STATUS_SUCCESS &&
          set(&split, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, scheme) == CUBLAS_STATUS_SUCCESS)
        offer(split);
    }
    for (int shape : {CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x1x1, CUBLASLT_CLUSTER_SHAPE_1x2x1,
                      CUBLASLT_CLUSTER_SHAPE_2x2x1, CUBLASLT_CLUSTER_SHAPE_4x1x1, CUBLASLT_CLUSTER_SHAPE_1x4x1}) {
      cublasLtMatmulAlgo_t clustered = algorithm;
      if (set(&clustered, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, static_cast<uint16_t>(shape)) == CUBLAS_STATUS_SUCCESS)
        offer(clustered);
    }
  }

  const std::vector<cublasLtMatmulAlgo_t> &found() const { return found_; }

 private:
  bool known(const cublasLtMatmulAlgo_t &algorithm) const {
    for (const cublasLtMatmulAlgo_t &other : found_)
      if (memcmp(&other, &algorithm, sizeof(algorithm)) == 0) return true;
    return false;
  }

  const Plan &plan_;
  Layouts *layouts_;
  size_t workspace_bytes_, capacity_;
  std::vector<cublasLtMatmulAlgo_t> found_;
};

// Up to `capacity` algorithms in the order in which cublasLt expects them to be fast.
cublasStatus_t propose(const Plan &plan, Layouts *layouts, size_t workspace_bytes, int capacity,
                       std::vector<cublasLtMatmulAlgo_t> *algorithms) {
  cublasLtMatmulPreference_t preference;
  cublasStatus_t code = cublasLtMatmulPreferenceCreate(&preference);
  if (code != CUBLAS_STATUS_SUCCESS) return code;
  code = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                              sizeof(workspace_bytes));
  std::vector<cublasLtMatmulHeuristicResult_t> results(capacity);
  int count = 0;
  if (code == CUBLAS_STATUS_SUCCESS)
    code = cublasLtMatmulAlgoGetHeuristic(plan.handle, plan.product, &layouts->weight, &layouts->x, &layouts->out,
                                          &layouts->out, preference, capacity, results.data(), &count);
  cublasLtMatmulPreferenceDestroy(preference);
  for (int i = 0; i < count; ++i)
    if (results[i].state == CUBLAS_STATUS_SUCCESS) algorithms->push_back(results[i].algo);
  return code;
}

}  // namespace

extern "C" int baton_lt_create(void **handle, uint64_t *version) {
  *version = cublasLtGetVersion();
  return status(cublasLtCreate(reinterpret_cast<cublasLtHandle_t *>(handle)));
}

extern "C" int baton_lt_destroy(void *handle) { return status(cublasLtDestroy(static_cast<cublasLtHandle_t>(handle))); }

extern "C" int baton_lt_plan(void *handle, int kind, int n, int k, int bias, void **plan) {
  Plan *const made = new (std::nothrow)
      Plan{static_cast<cublasLtHandle_t>(handle), nullptr, static_cast<Kind>(kind), bias != 0, n, k};
  if (made == nullptr) return cudaErrorMemoryAllocation;
  const cublasStatus_t code = describe(made);
  if (code == CUBLAS_STATUS_SUCCESS) {
    *plan = made;
    return cudaSuccess;
  }
  if (made->product != nullptr) cublasLtMatmulDescDestroy(made->product);
  delete made;
  return status(code);
}

extern "C" int baton_lt_forget(void *plan) {
  Plan *const gone = static_cast<Plan *>(plan);
  const cublasStatus_t code = cublasLtMatmulDescDestroy(gone->product);
  delete gone;
  return status(code);
}

// Writes up to `capacity` algorithms of 64 bytes each for m rows, the most promising first: those that cublasLt proposes
// and variations of its best. `stand_in` is any 16-byte aligned device memory, taken for the bias and the scales.
extern "C" int baton_lt_candidates(void *plan, int m, uint64_t workspace_bytes, const void *stand_in, int capacity,
                                   void *algorithms, int *count) {
  const Plan &p = *static_cast<Plan *>(plan);
  Layouts layouts;
  cublasStatus_t code = layouts.make(p, m);
  if (code == CUBLAS_STATUS_SUCCESS) code = aim(p, stand_in, stand_in, stand_in);
  std::vector<cublasLtMatmulAlgo_t> proposed;
  if (code == CUBLAS_STATUS_SUCCESS) code = propose(p, &layouts, workspace_bytes, capacity, &proposed);
  if (code != CUBLAS_STATUS_SUCCESS) return status(code);
  Candidates candidates(p, &layouts, workspace_bytes, capacity);
  for (const cublasLtMatmulAlgo_t &algorithm : proposed) candidates.offer(algorithm);
  for (size_t i = 0; i < proposed.size() && i < 4; ++i) candidates.offer_variations(proposed[i]);
  *count = static_cast<int>(candidates.found().size());
  memcpy(algorithms, candidates.found().data(), *count * sizeof(cublasLtMatmulAlgo_t));
  return cudaSuccess;
}

// How much workspace `algorithm` needs for m rows; CUBLAS_STATUS_NOT_SUPPORTED where it cannot compute them.
extern "C" int baton_lt_workspace(void *plan, int m, const void *stand_in, const void *algorithm, uint64_t *bytes) {
  const Plan &p = *static_cast<Plan *>(plan);
  Layouts layouts;
  cublasStatus_t code = layouts.make(p, m);
  if (code == CUBLAS_STATUS_SUCCESS) code = aim(p, stand_in, stand_in, stand_in);
  cublasLtMatmulHeuristicResult_t result{};
  if (code == CUBLAS_STATUS_SUCCESS)
    code = cublasLtMatmulAlgoCheck(p.handle, p.product, &layouts.weight, &layouts.x, &layouts.out, &layouts.out,
                                   static_cast<const cublasLtMatmulAlgo_t *>(algorithm), &result);
  *bytes = result.workspaceSize;
  return status(code);
}

// One product of m rows; `algorithm` may be null: cublasLt takes its own first choice.
extern "C" int baton_lt_matmul(void *plan, const void *algorithm, int m, const void *x, const void *weight, void *out,
                               const void *bias, const void *x_scale, const void *weight_scale, void *workspace,
                               uint64_t workspace_bytes, void *stream) {
  const Plan &p = *static_cast<Plan *>(plan);
  Layouts layouts;
  cublasStatus_t code = layouts.make(p, m);
  if (code == CUBLAS_STATUS_SUCCESS) code = aim(p, bias, x_scale, weight_scale);
  if (code != CUBLAS_STATUS_SUCCESS) return status(code);
  const float one = 1.f, zero = 0.f;
  return status(cublasLtMatmul(p.handle, p.product, &one, weight, &layouts.weight, x, &layouts.x, &zero, out,
                               &layouts.out, out, &layouts.out, static_cast<const cublasLtMatmulAlgo_t *>(algorithm),
                               workspace, workspace_bytes, static_cast<cudaStream_t>(stream)));
}
