// The C interface: open a model of a shape, load its weights one by one, run steps, close.
#include <algorithm>
#include <memory>
#include <optional>

#include "forward.h"
#include "step.h"

namespace baton {

class Model {
 public:
  virtual ~Model() = default;
  virtual void load(int kind, int layer, int expert, const void* data) = 0;
  virtual void fill(const BatonStep& step) = 0;
  virtual void finish() = 0;
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

  // A step of one row a sequence is computed to its end: nobody waits for one more row's KV, and to start a team takes
  // its time.
  void fill(const BatonStep& step) override {
    pass_.reset();
    scratch_.reserve(shape_, team_.size(), step.tokens);
    step_ = step;
    pass_.emplace(shape_, weights_, scratch_, step_, tasks_);
    team_for(step.tokens).run([this](Member& me) {
      pass_->fill(me);
      if (!is_split()) pass_->finish(me);
    });
  }

  void finish() override {
    if (pass_ && is_split() && step_.logit_row_count > 0) {
      team_for(step_.logit_row_count).run([this](Member& me) { pass_->finish(me); });
    }
    pass_.reset();
  }

  int vocab() const override { return shape_.vocab; }

 private:
  bool is_split() const { return step_.tokens > step_.sequences; }
  Team& team_for(int rows) { return rows <= kSmallStep ? small_team_ : team_; }

  BatonShape shape_;
  Team team_;
  Team small_team_;
  ModelWeights<E> weights_;
  Scratch<E> scratch_;
  std::vector<AttentionTask> tasks_;
  BatonStep step_{};                // the one that was filled last
  std::optional<Forward<E>> pass_;  // over step_, until it is finished
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

// Writes the step's keys and values. Its arrays must stay until it is finished, or the next one is filled.
BatonFault baton_native_fill(void* handle, const BatonStep* step) {
  auto* model = static_cast<baton::Model*>(handle);
  const BatonFault fault = baton::check_step(*step, model->vocab());
  if (fault.code != kNone) return fault;
  try {
    model->fill(*step);
    return fault;
  } catch (const std::exception&) {
    return {kOutOfMemory, 0, step->tokens, 0};
  }
}

// Computes the logits of the step that was filled last; nothing where there is none.
void baton_native_finish(void* model) { static_cast<baton::Model*>(model)->finish(); }

void baton_native_close(void* model) { delete static_cast<baton::Model*>(model); }

const char* baton_native_lanes() { return baton::kLaneKind; }

#pragma GCC visibility pop
}
