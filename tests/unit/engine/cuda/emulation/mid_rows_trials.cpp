// Runs the kernels of src/mid_rows.cu on emulated blocks, with whole numbers whose sums are exact, and compares every
// output. kernel.h is the kernel's source, its shared memory placed by `place`. The argument seeds the order of turns.
#include "device.h"

// Shared memory of the block that runs: barriers, terms, then the stages.
constexpr int BARRIERS = 0, TERMS = 2048, STAGES_AT = 8192;
inline void *place(int at) { return here().memory.data() + at; }

#include "kernel.h"

namespace baton::mid_rows {
namespace {

std::mt19937 chance;
int below(int limit) { return static_cast<int>(chance() % static_cast<unsigned>(limit)); }

template <typename Value>
Value small(int number);
template <>
__nv_bfloat16 small<__nv_bfloat16>(int number) {
  return rounded(static_cast<float>(number));
}
template <>
__nv_fp8_e4m3 small<__nv_fp8_e4m3>(int number) {
  return {static_cast<uint8_t>(number == 0 ? 0 : number > 0 ? 0x38 : 0xb8)};
}

constexpr uint16_t POISON = 0x7fc1;

template <typename S>
struct Trial {
  using Value = typename S::Value;
  int rows, n, k, splits;
  std::vector<Value> x, weight;
  std::vector<float> x_scale, weight_scale;
  std::vector<__nv_bfloat16> bias, out;

  Trial(int rows, int n, int k, int splits) : rows(rows), n(n), k(k), splits(splits) {
    for (int i = 0; i < rows * k; ++i) x.push_back(small<Value>(below(3) - 1));
    for (int i = 0; i < n * k; ++i) weight.push_back(small<Value>(below(3) - 1));
    for (int i = 0; i < rows; ++i) x_scale.push_back(1 << below(3));
    for (int i = 0; i < n; ++i) weight_scale.push_back(1 << below(3)), bias.push_back(rounded(below(9) - 4));
    out.assign(rows * n + 64, {POISON});
  }

  void check() const {
    for (int row = 0; row < rows; ++row)
      for (int column = 0; column < n; ++column) {
        float sum = 0.f;
        for (int i = 0; i < k; ++i) sum += number(x[row * k + i]) * number(weight[column * k + i]);
        if (sizeof(Value) == 1) sum *= x_scale[row] * weight_scale[column];
        if (out[row * n + column].bits != rounded(sum + number(bias[column])).bits) fail("an output is wrong");
      }
    for (int i = rows * n; i < rows * n + 64; ++i)
      if (out[i].bits != POISON) fail("something is written past the last output");
  }
};

std::function<void()> kernel;

void begin() {
  kernel();
  current->done = true, --current->block->running, --current->block->cluster->running;
  swapcontext(&current->context, &device);
}

// The blocks and threads of a launch.
struct Launch {
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::unique_ptr<::Block>> blocks;
  std::vector<std::unique_ptr<Thread>> threads;

  Launch(int count, int cluster_size, int block_threads, int shared_bytes) {
    for (int c = 0; c < count; ++c) {
      clusters.push_back(std::make_unique<Cluster>());
      for (int rank = 0; rank < cluster_size; ++rank) add(rank, block_threads, shared_bytes);
    }
  }

  void add(int rank, int block_threads, int shared_bytes) {
    Cluster &cluster = *clusters.back();
    const int index = static_cast<int>(blocks.size());
    blocks.push_back(std::make_unique<::Block>(::Block{&cluster, index, rank, block_threads, block_threads}));
    ::Block &block = *blocks.back();
    block.memory.assign(STAGES_AT + shared_bytes, 0xff), block.warps.resize(block_threads / WARP);
    cluster.blocks.push_back(&block), cluster.running += block_threads;
    for (int i = 0; i < block_threads; ++i) {
      threads.push_back(std::make_unique<Thread>(Thread{&block, i}));
      Thread &thread = *threads.back();
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.data(), thread.context.uc_stack.ss_size = thread.stack.size();
      makecontext(&thread.context, begin, 0);
    }
  }

  // Turn after turn until all have returned; `arrive` is called when the kernel before finishes.
  void run(const std::function<void()> &arrive) {
    const bool in_order = below(3) == 0, slow = below(2) == 0;
    size_t running = threads.size();
    for (int round = 0; running > 0; ++round) {
      if (round == 40) arrive();
      if (round > 1'000'000) fail("the kernel does not end");
      for (const auto &thread : threads) {
        if (thread->done || (!in_order && below(4) == 0)) continue;
        current = thread.get(), threadIdx.x = current->index, blockIdx.x = current->block->index;
        swapcontext(&device, &current->context);
        running -= thread->done;
      }
      for (int ends = slow ? below(6) == 0 : 1 + below(3); ends > 0 && !copies.empty(); --ends) {
        const int which = below(static_cast<int>(copies.size()));
        const Copy copy = copies[which];
        copies.erase(copies.begin() + which);
        finish(copy);
      }
    }
    if (!copies.empty()) fail("copies are under way when the kernel has ended");
  }
};

template <typename S>
void attempt(int rows, int n, int k, int splits) {
  Trial<S> trial(rows, n, k, splits);
  const int size = sizeof(typename S::Value), tiles = S::WEIGHT_ROWS * S::PAIR;
  // Until the kernel before has finished, x and its scales are no numbers.
  std::vector<uint8_t> x(trial.x.size() * size, 0xff);
  std::vector<float> x_scale(rows, NAN);
  const CUtensorMap weight_map{reinterpret_cast<const uint8_t *>(trial.weight.data()), n, k, S::WEIGHT_ROWS, size};
  const CUtensorMap x_map{x.data(), rows, k, S::COLUMNS / S::PAIR, size};
  const Product product{trial.bias.data(), x_scale.data(), trial.weight_scale.data(), trial.out.data(),
                        rows,              n,              k,                         splits};
  kernel = [&] { mid_rows_kernel<S>(weight_map, x_map, product); };
  predecessor_finished = false;
  Launch((n + tiles - 1) / tiles, S::PAIR * splits, S::THREADS, S::SHARED).run([&] {
    memcpy(x.data(), trial.x.data(), x.size());
    std::copy(trial.x_scale.begin(), trial.x_scale.end(), x_scale.begin());
    predecessor_finished = true;
  });
  trial.check();
}

// Less than a unit of k, some for each block, more than the ring has stages, and k and n that end inside a unit and tile.
template <typename Value, int COLUMNS, int GROUPS, int PAIR, Resident RESIDENT>
void attempts(int rows) {
  using S = Shape<Value, COLUMNS, GROUPS, PAIR, RESIDENT>;
  attempt<S>(rows, 8, S::UNIT / 2, 1);
  attempt<S>(rows, S::WEIGHT_ROWS * PAIR + 24, 3 * S::UNIT + 16, 3);
  attempt<S>(rows, S::WEIGHT_ROWS + 8, (2 * S::STAGES + 3) * S::UNIT, 2);
  attempt<S>(rows, 40, 9 * S::UNIT, MOST_BLOCKS / PAIR);
}

}  // namespace
}  // namespace baton::mid_rows

int main(int, char **arguments) {
  using namespace baton::mid_rows;
  chance.seed(static_cast<unsigned>(atoi(arguments[1])));
  attempts<bf16, 32, 1, 1, Resident::TWO>(17);
  attempts<bf16, 64, 1, 1, Resident::TWO>(50);
  attempts<bf16, 32, 2, 2, Resident::TWO>(30);
  attempts<fp8, 96, 1, 2, Resident::TWO>(90);
  attempts<fp8, 32, 4, 1, Resident::ONE>(32);
  puts("every output is right");
}
