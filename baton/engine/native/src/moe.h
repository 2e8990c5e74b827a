// A mixture of experts: rows are grouped by expert, and every expert runs once over its rows.
#pragma once

#include "scratch.h"
#include "weights.h"

namespace baton {

// Softmax over all experts, the top_k likeliest in ascending order of expert, their weights. Ties go to the lower id.
inline void choose_experts(const BatonShape& shape, float* scores, int* chosen, float* shares) {
  const float highest = *std::max_element(scores, scores + shape.experts);
  float total = 0;
  for (int e = 0; e < shape.experts; ++e) total += scores[e] = std::exp(scores[e] - highest);
  float kept = 0;
  for (int k = 0; k < shape.top_k; ++k) {
    const int best = static_cast<int>(std::max_element(scores, scores + shape.experts) - scores);
    int at = k;
    for (; at > 0 && chosen[at - 1] > best; --at) {
      chosen[at] = chosen[at - 1];
      shares[at] = shares[at - 1];
    }
    chosen[at] = best;
    shares[at] = scores[best] / total;
    kept += shares[at];
    scores[best] = -1.0f;
  }
  if (shape.renormalize == 0) return;
  for (int k = 0; k < shape.top_k; ++k) shares[k] /= kept;
}

// Gives every (row, choice) a slot, so that the slots of an expert are neighbours, in row order.
template <class E>
void group_by_expert(const BatonShape& shape, const Scratch<E>& scratch, int rows) {
  int* starts = scratch.expert_starts;
  std::fill(starts, starts + shape.experts + 1, 0);
  const int slots = rows * shape.top_k;
  for (int i = 0; i < slots; ++i) ++starts[scratch.chosen[i] + 1];
  for (int e = 0; e < shape.experts; ++e) starts[e + 1] += starts[e];
  for (int i = 0; i < slots; ++i) {
    const int slot = starts[scratch.chosen[i]]++;
    scratch.row_slots[i] = slot;
    scratch.slot_rows[slot] = i / shape.top_k;
  }
  for (int e = shape.experts; e > 0; --e) starts[e] = starts[e - 1];
  starts[0] = 0;
}

// Runs one matrix of every expert over the expert's slots; ends with a barrier.
template <class E, class Finish>
void multiply_experts(Member& me, const Rows<E>& slots, const int* starts, const std::vector<Panels>& experts,
                      const Finish& finish) {
  const int panels = panel_count(experts[0].columns);
  me.each(static_cast<int>(experts.size()) * panels, [&](int task) {
    const int expert = task / panels;
    const Range rows = {starts[expert], starts[expert + 1]};
    if (rows.begin == rows.end) return;
    const Panels& matrix = experts[expert];
    const int first = task % panels * kPanelVectors;
    multiply_block<E>(slots, rows, matrix, {first, std::min(matrix.vectors(), first + kPanelVectors)}, finish);
  });
}

// x[row] += sum over the row's experts of share * expert(normed[row])
template <class E>
void mix_experts(Member& me, const BatonShape& shape, const Layer<E>& layer, const Scratch<E>& scratch,
                 const Rows<E>& normed, int rows) {
  const int top_k = shape.top_k;
  const int hidden = shape.hidden;
  multiply<E>(me, normed, rows, layer.router, 1, StoreSums{scratch.router, shape.experts, shape.experts, nullptr});
  const Range mine = me.share(rows);
  for (int r = mine.begin; r < mine.end; ++r) {
    choose_experts(shape, scratch.router + r * shape.experts, scratch.chosen + r * top_k, scratch.shares + r * top_k);
  }
  me.barrier();
  if (me.index() == 0) group_by_expert<E>(shape, scratch, rows);
  me.barrier();
  const Range slots = me.share(rows * top_k);
  for (int i = slots.begin; i < slots.end; ++i) {
    std::memcpy(scratch.routed + static_cast<ptrdiff_t>(i) * hidden, normed.words(scratch.slot_rows[i]),
                hidden * sizeof(typename E::Store));
  }
  me.barrier();
  multiply_experts<E>(me, {scratch.routed, hidden}, scratch.expert_starts, layer.expert_gate_up,
                      GateSums<E>{scratch.gated, shape.expert_ffn, nullptr});
  multiply_experts<E>(me, {scratch.gated, shape.expert_ffn}, scratch.expert_starts, layer.expert_down,
                      StoreSums{scratch.expert_out, hidden, hidden, nullptr});
  for (int r = mine.begin; r < mine.end; ++r) {
    float* x = scratch.x + static_cast<ptrdiff_t>(r) * hidden;
    for (int i = 0; i < hidden; i += kLanes) {
      F16 sum = zero();
      for (int k = 0; k < top_k; ++k) {
        const float* out = scratch.expert_out + static_cast<ptrdiff_t>(scratch.row_slots[r * top_k + k]) * hidden;
        sum = multiply_add(splat(scratch.shares[r * top_k + k]), load(out + i), sum);
      }
      store(x + i, add(load(x + i), sum));
    }
  }
  me.barrier();
}

}  // namespace baton
