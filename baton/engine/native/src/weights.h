// The packed weights of one model, in one arena.
#pragma once

#include <vector>

#include "abi.h"
#include "panel.h"

namespace baton {

template <class E>
struct Layer {
  Panels qkv, output, gate_up, down, router;
  std::vector<Panels> expert_gate_up, expert_down;
  const float* attn_norm = nullptr;
  const float* mlp_norm = nullptr;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  const float* qkv_bias = nullptr;
  const float* output_bias = nullptr;
  const float* gate_up_bias = nullptr;
  const float* down_bias = nullptr;
};

template <class E>
class ModelWeights {
 public:
  using Store = typename E::Store;

  explicit ModelWeights(const BatonShape& shape)
      : shape_(shape), arena_(bytes_needed(shape)), layers_(static_cast<size_t>(shape.layers)) {
    for (auto& layer : layers_) {
      layer.expert_gate_up.resize(shape.experts);
      layer.expert_down.resize(shape.experts);
    }
  }

  const Layer<E>& layer(int index) const { return layers_[index]; }
  const Panels& head() const { return head_; }
  const float* final_norm() const { return final_norm_; }
  const float* rope_frequencies() const { return rope_frequencies_; }

  // The embedding of a token, widened. With a tied head it is read from the head's panels.
  void embed(int token, float* out) const {
    if (embed_ == nullptr) return unpack_row<E>(head_, token, out);
    const Store* row = embed_ + static_cast<size_t>(token) * shape_.hidden;
    for (int i = 0; i < shape_.hidden; i += kLanes) store(out + i, E::load(row + i));
  }

  // Takes one weight. Matrices come row-major in the element type (experts one by one), vectors as float32.
  void load_weight(Team& team, int kind, int index, int expert, const void* data) {
    switch (kind) {
      case kEmbed: return shape_.tied_head ? load_head(team, data) : load_embed(data);
      case kHead: return load_head(team, data);
      case kFinalNorm: final_norm_ = copy(data, shape_.hidden); return;
      case kRopeFrequencies: rope_frequencies_ = copy(data, shape_.head_dim / 2); return;
      default: load_layer(team, kind, layers_[index], expert, data);
    }
  }

 private:
  int qkv_columns() const { return (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim; }
  int q_columns() const { return shape_.heads * shape_.head_dim; }

  void load_embed(const void* data) {
    const size_t count = static_cast<size_t>(shape_.vocab) * shape_.hidden;
    embed_ = arena_.take<Store>(count);
    std::memcpy(embed_, data, count * sizeof(Store));
  }

  void load_head(Team& team, const void* data) { head_ = plain(team, data, shape_.vocab, shape_.hidden); }

  void load_layer(Team& team, int kind, Layer<E>& layer, int expert, const void* data) {
    const BatonShape& s = shape_;
    switch (kind) {
      case kAttnNorm: layer.attn_norm = copy(data, s.hidden); return;
      case kMlpNorm: layer.mlp_norm = copy(data, s.hidden); return;
      case kQNorm: layer.q_norm = copy(data, s.head_dim); return;
      case kKNorm: layer.k_norm = copy(data, s.head_dim); return;
      case kQkv: layer.qkv = plain(team, data, qkv_columns(), s.hidden); return;
      case kQkvBias: layer.qkv_bias = copy(data, qkv_columns()); return;
      case kOutput: layer.output = plain(team, data, s.hidden, q_columns()); return;
      case kOutputBias: layer.output_bias = copy(data, s.hidden); return;
      case kGateUp: layer.gate_up = gated(team, data, s.ffn); return;
      case kGateUpBias: layer.gate_up_bias = gated_copy(data, s.ffn); return;
      case kDown: layer.down = plain(team, data, s.hidden, s.ffn); return;
      case kDownBias: layer.down_bias = copy(data, s.hidden); return;
      case kRouter: layer.router = plain(team, data, s.experts, s.hidden); return;
      case kExpertGateUp: layer.expert_gate_up[expert] = gated(team, data, s.expert_ffn); return;
      case kExpertDown: layer.expert_down[expert] = plain(team, data, s.hidden, s.expert_ffn); return;
      default: return;
    }
  }

  Panels plain(Team& team, const void* data, int columns, int depth) {
    return pack<E>(team, arena_, data, columns, depth, PlainOrder{});
  }

  Panels gated(Team& team, const void* data, int ffn) {
    return pack<E>(team, arena_, data, 2 * ffn, shape_.hidden, GatedOrder{ffn});
  }

  const float* copy(const void* data, int count) {
    float* to = arena_.take<float>(padded_columns(count));
    std::memcpy(to, data, count * sizeof(float));
    return to;
  }

  const float* gated_copy(const void* data, int ffn) {
    float* to = arena_.take<float>(padded_columns(2 * ffn));
    const float* from = static_cast<const float*>(data);
    const GatedOrder order{ffn};
    for (int c = 0; c < 2 * ffn; ++c) to[c] = from[order(c)];
    return to;
  }

  static size_t bytes_needed(const BatonShape& s) {
    const int q = s.heads * s.head_dim;
    const int qkv = q + 2 * s.kv_heads * s.head_dim;
    const size_t head = panel_bytes<E>(s.vocab, s.hidden);
    const size_t embed = s.tied_head ? 0 : static_cast<size_t>(s.vocab) * s.hidden * sizeof(Store);
    size_t layer = panel_bytes<E>(qkv, s.hidden) + panel_bytes<E>(s.hidden, q);
    if (s.experts > 0) {
      const size_t expert = panel_bytes<E>(2 * s.expert_ffn, s.hidden) + panel_bytes<E>(s.hidden, s.expert_ffn);
      layer += s.experts * expert + panel_bytes<E>(s.experts, s.hidden);
    } else {
      layer += panel_bytes<E>(2 * s.ffn, s.hidden) + panel_bytes<E>(s.hidden, s.ffn);
    }
    const size_t vectors = (4 * s.hidden + 2 * s.ffn + qkv + 2 * s.head_dim + 8 * kPanelColumns) * sizeof(float);
    return head + embed + s.layers * (layer + vectors) + 4 * (s.hidden + s.head_dim + kPanelColumns) * sizeof(float);
  }

  BatonShape shape_;
  Arena arena_;
  std::vector<Layer<E>> layers_;
  Panels head_;
  Store* embed_ = nullptr;
  const float* final_norm_ = nullptr;
  const float* rope_frequencies_ = nullptr;
};

}  // namespace baton
