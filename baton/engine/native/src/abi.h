// The C structures shared with decoder.py, field by field in the same order.
#pragma once

#include <cstdint>

extern "C" {

struct BatonShape {
  int32_t element;  // 0 float32, 1 bfloat16
  int32_t threads;
  int32_t vocab;
  int32_t hidden;
  int32_t ffn;
  int32_t layers;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t window;  // INT32_MAX when attention is not windowed
  int32_t tied_head;
  int32_t experts;  // 0 for a dense model
  int32_t top_k;
  int32_t expert_ffn;
  int32_t renormalize;
  float norm_eps;
};

// Which weight a call of baton_native_load brings.
enum BatonWeight : int32_t {
  kEmbed,
  kHead,
  kFinalNorm,
  kRopeFrequencies,
  kAttnNorm,
  kMlpNorm,
  kQNorm,
  kKNorm,
  kQkv,
  kQkvBias,
  kOutput,
  kOutputBias,
  kGateUp,
  kGateUpBias,
  kDown,
  kDownBias,
  kRouter,
  kExpertGateUp,
  kExpertDown,
};

struct BatonStep {
  const int32_t* token_ids;     // [tokens]
  const int32_t* positions;     // [tokens]
  const int32_t* seq_starts;    // [sequences + 1]
  const int32_t* block_tables;  // [sequences, table_width]
  const int32_t* logit_rows;    // [logit_rows_count]
  const int32_t* windows;       // [sequences], positions a token of it sees at most; null: as the shape says
  int32_t tokens;
  int32_t sequences;
  int32_t table_width;
  int32_t logit_row_count;
  int32_t blocks;
  int32_t block_size;
  int32_t context_length;
  void* pool;     // [blocks, layers, 2, kv_heads, block_size, head_dim]
  float* logits;  // [logit_row_count, vocab]
};

// What is wrong with a step: code 0 means nothing, others are the BatonFault values.
struct BatonFault {
  int32_t code;
  int32_t index;
  int32_t value;
  int32_t limit;
};

enum BatonFaultCode : int32_t {
  kNone,
  kTokenOutOfRange,
  kPositionOutOfRange,
  kPositionNotConsecutive,
  kSeqStartsUnordered,
  kTableTooNarrow,
  kBlockOutOfRange,
  kLogitRowOutOfRange,
  kLogitRowsUnordered,
  kOutOfMemory,
  kWindowOutOfRange,
};
}
