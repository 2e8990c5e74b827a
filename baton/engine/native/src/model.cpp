// The C interface: open a model of a shape, load its weights one by one, run steps, close.
#include <algorithm>
#include <memory>

#include "forward.h"
#include "step.h"

namespace baton {

class Model {
 public:
  virtual ~Model() = default;
  virtual void load(int kind, int layer, int expert, const void* data) = 0;
  virtual void forward(const BatonStep& step) = 0;
  virtual int vocab() const = 0;
};

// A step of so few rows waits for memory, not for arithmetic, and one core less hardly slows it. That core is left to
// the servers around the engine, whose every wake-up would otherwise stop the whole team at its next barrier.
constexpr int kSmallStep = 2;

template <class E>
class ModelOf final : public Model {
 public:
  explicit ModelOf(const BatonShape& shape)
      : shape_(shape), team_(shape.threads), small_team_(std::max(1, shape.threads - 1)), weights_(shape) {}

  void load(int kind, int layer, int expert, const void* data) override {
    weights_.load_weight(team_, kind, layer, expert, data);
  }

  void forward(const BatonStep& step) override {
    scratch_.reserve(shape_, team_.size(), step.tokens);
    const Forward<E> pass(shape_, weights_, scratch_, step, tasks_);
    (step.tokens <= kSmallStep ? small_team_ : team_).run(pass);
  }

  int vocab() const override { return shape_.vocab; }

 private:
  BatonShape shape_;
  Team team_;
  Team small_team_;
  ModelWeights<E> weights_;
  Scratch<E> scratch_;
  std::vector<AttentionTask> tasks_;
};

}  // namespace baton

extern "C" {
#pragma GCC visibility push(default)

// Null when memory does not suffice.
void* baton_native_open(const BatonShape* shape) {
  try {
    if (shape->element == 0) return new baton::ModelOf<baton::Float32>(*shape);
    return new baton::ModelOf<baton::BFloat16>(*shape);
  } catch (const std::exception&) {
    return nullptr;
  }
}

// 0, or 1 when memory does not suffice.
int baton_native_load(void* model, int kind, int layer, int expert, const void* data) {
  try {
    static_cast<baton::Model*>(model)->load(kind, layer, expert, data);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

BatonFault baton_native_forward(void* handle, const BatonStep* step) {
  auto* model = static_cast<baton::Model*>(handle);
  const BatonFault fault = baton::check_step(*step, model->vocab());
  if (fault.code != kNone) return fault;
  try {
    model->forward(*step);
    return fault;
  } catch (const std::exception&) {
    return {kOutOfMemory, 0, step->tokens, 0};
  }
}

void baton_native_close(void* model) { delete static_cast<baton::Model*>(model); }

const char* baton_native_lanes() { return baton::kLaneKind; }

#pragma GCC visibility pop
}
