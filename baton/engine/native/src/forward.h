// One step of the whole model, run by every member of a team in lockstep.
#pragma once

#include "moe.h"
#include "rowwise.h"

namespace baton {

// A piece of attention work: some tokens of one sequence and all query heads of one KV head.
struct AttentionTask {
  int sequence;
  int kv_head;
  int first_row;
  int rows;
};

template <class E>
class Forward {
 public:
  using Store = typename E::Store;

  Forward(const BatonShape& shape, const ModelWeights<E>& weights, const Scratch<E>& scratch, const BatonStep& step,
          std::vector<AttentionTask>& tasks)
      : shape_(shape), weights_(weights), scratch_(scratch), step_(step), tasks_(tasks) {
    group_ = shape.heads / shape.kv_heads;
    q_size_ = shape.heads * shape.head_dim;
    kv_size_ = shape.kv_heads * shape.head_dim;
    plan_attention();
  }

  // All that writes keys and values: every layer, the last one as far as its attention.
  void fill(Member& me) const {
    embed(me);
    for (int i = 0; i + 1 < shape_.layers; ++i) {
      attention(me, i);
      feed_forward(me, i, step_.tokens);
    }
    attention(me, shape_.layers - 1);
  }

  // The rest, after fill: the logits.
  void finish(Member& me) const {
    if (step_.logit_row_count == 0) return;
    keep_logit_rows(me);
    feed_forward(me, shape_.layers - 1, step_.logit_row_count);
    head(me);
  }

 private:
  // Blocks of tokens, the longest views first so that no member is left with a long one at the end.
  void plan_attention() {
    tasks_.clear();
    const int block = std::max(1, kQueryRows / group_);
    one_block_ = true;
    for (int s = 0; s < step_.sequences; ++s) {
      const int end = step_.seq_starts[s + 1];
      one_block_ = one_block_ && end - step_.seq_starts[s] <= block;
      for (int row = step_.seq_starts[s]; row < end; row += block) {
        for (int h = 0; h < shape_.kv_heads; ++h) tasks_.push_back({s, h, row, std::min(block, end - row)});
      }
    }
    std::stable_sort(tasks_.begin(), tasks_.end(), [this](const AttentionTask& a, const AttentionTask& b) {
      return step_.positions[a.first_row] > step_.positions[b.first_row];
    });
  }

  float* x(int row) const { return scratch_.x + static_cast<ptrdiff_t>(row) * shape_.hidden; }

  void embed(Member& me) const {
    const int half = shape_.head_dim / 2;
    const Range mine = me.share(step_.tokens);
    for (int r = mine.begin; r < mine.end; ++r) {
      weights_.embed(step_.token_ids[r], x(r));
      rope_angles(step_.positions[r], weights_.rope_frequencies(), half, scratch_.cosines + r * half,
                  scratch_.sines + r * half);
    }
    me.barrier();
  }

  Rows<E> normalized(Member& me, const float* weight, int rows) const {
    const bool own = rows <= kPrivateRows;
    Store* to = own ? scratch_.private_rows[me.index()] : scratch_.normed;
    const Range mine = own ? Range{0, rows} : me.share(rows);
    for (int r = mine.begin; r < mine.end; ++r) {
      normalize<E>(x(r), weight, shape_.hidden, shape_.norm_eps, to + static_cast<ptrdiff_t>(r) * shape_.hidden);
    }
    if (!own) me.barrier();
    return {to, shape_.hidden};
  }

  CacheView<E> cache(int layer, int kv_head, int sequence) const {
    const ptrdiff_t head = static_cast<ptrdiff_t>(step_.block_size) * shape_.head_dim;
    const ptrdiff_t side = head * shape_.kv_heads;
    Store* keys = static_cast<Store*>(step_.pool) + layer * 2 * side + kv_head * head;
    const int32_t* table = step_.block_tables + static_cast<ptrdiff_t>(sequence) * step_.table_width;
    return {keys, side, shape_.layers * 2 * side, step_.block_size, shape_.head_dim, table};
  }

  Store* queries(int kv_head, int row) const {
    const ptrdiff_t tokens = static_cast<ptrdiff_t>(kv_head) * step_.tokens + row;
    return scratch_.queries + tokens * group_ * shape_.head_dim;
  }

  // Rotates the task's queries and keys, and writes its keys and values to the cache.
  void rotate(int layer, const AttentionTask& task) const {
    const Layer<E>& weights = weights_.layer(layer);
    const CacheView<E> view = cache(layer, task.kv_head, task.sequence);
    const int dim = shape_.head_dim;
    for (int row = task.first_row; row < task.first_row + task.rows; ++row) {
      const float* qkv = scratch_.qkv + static_cast<ptrdiff_t>(row) * (q_size_ + 2 * kv_size_);
      const float* cosines = scratch_.cosines + row * (dim / 2);
      const float* sines = scratch_.sines + row * (dim / 2);
      for (int g = 0; g < group_; ++g) {
        rotate_head<E>(qkv + (task.kv_head * group_ + g) * dim, weights.q_norm, shape_.norm_eps, cosines, sines, dim,
                       queries(task.kv_head, row) + g * dim);
      }
      const float* key = qkv + q_size_ + task.kv_head * dim;
      Store* to = view.key(step_.positions[row]);
      rotate_head<E>(key, weights.k_norm, shape_.norm_eps, cosines, sines, dim, to);
      convert<E>(key + kv_size_, dim, to + view.value_offset);
    }
  }

  int window(int sequence) const {
    return step_.windows == nullptr ? shape_.window : std::min(shape_.window, step_.windows[sequence]);
  }

  // What a task reads that was there before the step.
  View<E> past(int layer, const AttentionTask& task) const {
    const int end = step_.positions[step_.seq_starts[task.sequence]];
    const int begin = std::max(0, step_.positions[task.first_row] - window(task.sequence) + 1);
    return {cache(layer, task.kv_head, task.sequence), std::min(begin, end), end};
  }

  void attend_task(int layer, int index, const Member& me) const {
    const AttentionTask& task = tasks_[index];
    const AttentionTask& next = tasks_[std::min<size_t>(index + me.team_size(), tasks_.size() - 1)];
    const int dim = shape_.head_dim;
    const float scale = 1.44269504f / std::sqrt(static_cast<float>(dim));
    Store* out = scratch_.attended + static_cast<ptrdiff_t>(task.first_row) * q_size_ + task.kv_head * group_ * dim;
    const Queries<E> rows = {queries(task.kv_head, task.first_row), task.rows, group_,
                             step_.positions[task.first_row], window(task.sequence), scale, out, q_size_};
    attend<E>(rows, cache(layer, task.kv_head, task.sequence), past(layer, next), scratch_.attention[me.index()]);
  }

  bool holds_logit_row(const AttentionTask& task) const {
    const int32_t* end = step_.logit_rows + step_.logit_row_count;
    const int32_t* found = std::lower_bound(step_.logit_rows, end, task.first_row);
    return found != end && *found < task.first_row + task.rows;
  }

  // Reads x, writes the cache and scratch.attended. In the last layer only rows whose logits are wanted go on.
  void attention(Member& me, int layer) const {
    const Layer<E>& weights = weights_.layer(layer);
    const Rows<E> rows = normalized(me, weights.attn_norm, step_.tokens);
    const int columns = q_size_ + 2 * kv_size_;
    multiply<E>(me, rows, step_.tokens, weights.qkv, 1, StoreSums{scratch_.qkv, columns, columns, weights.qkv_bias});
    const bool last = layer == shape_.layers - 1;
    if (!one_block_) me.each(static_cast<int>(tasks_.size()), [&](int i) { rotate(layer, tasks_[i]); });
    me.each(static_cast<int>(tasks_.size()), [&](int i) {
      if (one_block_) rotate(layer, tasks_[i]);
      if (last && !holds_logit_row(tasks_[i])) return;
      attend_task(layer, i, me);
    });
  }

  void keep_logit_rows(Member& me) const {
    if (step_.logit_row_count == step_.tokens) return;
    if (me.index() == 0) {
      for (int i = 0; i < step_.logit_row_count; ++i) {
        const ptrdiff_t row = step_.logit_rows[i];
        std::memmove(x(i), x(static_cast<int>(row)), shape_.hidden * sizeof(float));
        std::memmove(scratch_.attended + static_cast<ptrdiff_t>(i) * q_size_, scratch_.attended + row * q_size_,
                     q_size_ * sizeof(Store));
      }
    }
    me.barrier();
  }

  void feed_forward(Member& me, int layer, int rows) const {
    const Layer<E>& weights = weights_.layer(layer);
    multiply<E>(me, {scratch_.attended, q_size_}, rows, weights.output, 1,
                AddSums{scratch_.x, shape_.hidden, weights.output_bias});
    const Rows<E> normed = normalized(me, weights.mlp_norm, rows);
    if (shape_.experts > 0) return mix_experts<E>(me, shape_, weights, scratch_, normed, rows);
    multiply<E>(me, normed, rows, weights.gate_up, 2, GateSums<E>{scratch_.gated, shape_.ffn, weights.gate_up_bias});
    multiply<E>(me, {scratch_.gated, shape_.ffn}, rows, weights.down, 1,
                AddSums{scratch_.x, shape_.hidden, weights.down_bias});
  }

  void head(Member& me) const {
    const Rows<E> rows = normalized(me, weights_.final_norm(), step_.logit_row_count);
    multiply<E>(me, rows, step_.logit_row_count, weights_.head(), 1,
                StoreSums{step_.logits, shape_.vocab, shape_.vocab, nullptr});
  }

  const BatonShape& shape_;
  const ModelWeights<E>& weights_;
  const Scratch<E>& scratch_;
  const BatonStep& step_;
  std::vector<AttentionTask>& tasks_;
  int group_;
  int q_size_;
  int kv_size_;
  bool one_block_ = true;
};

}  // namespace baton
