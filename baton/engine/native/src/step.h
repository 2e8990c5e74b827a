// Checks a step before anything is computed from it.
#pragma once

#include "abi.h"

namespace baton {

inline BatonFault check_sequence(const BatonStep& step, int sequence) {
  const int begin = step.seq_starts[sequence];
  const int end = step.seq_starts[sequence + 1];
  const int first = step.positions[begin];
  if (step.windows != nullptr && step.windows[sequence] < 1) {
    return {kWindowOutOfRange, sequence, step.windows[sequence], 1};
  }
  if (first < 0) return {kPositionOutOfRange, begin, first, step.context_length};
  for (int row = begin; row < end; ++row) {
    if (step.positions[row] != first + row - begin) {
      return {kPositionNotConsecutive, row, step.positions[row], first + row - begin};
    }
  }
  const int last = step.positions[end - 1];
  if (last >= step.context_length) return {kPositionOutOfRange, end - 1, last, step.context_length};
  const int needed = last / step.block_size + 1;
  if (needed > step.table_width) return {kTableTooNarrow, sequence, step.table_width, needed};
  const int32_t* table = step.block_tables + static_cast<int64_t>(sequence) * step.table_width;
  for (int i = 0; i < needed; ++i) {
    if (table[i] < 0 || table[i] >= step.blocks) return {kBlockOutOfRange, sequence, table[i], step.blocks};
  }
  return {kNone, 0, 0, 0};
}

inline BatonFault check_step(const BatonStep& step, int vocab) {
  for (int row = 0; row < step.tokens; ++row) {
    const int id = step.token_ids[row];
    if (id < 0 || id >= vocab) return {kTokenOutOfRange, row, id, vocab};
  }
  if (step.seq_starts[0] != 0) return {kSeqStartsUnordered, 0, step.seq_starts[0], 0};
  for (int s = 0; s < step.sequences; ++s) {
    const int next = step.seq_starts[s + 1];
    if (next <= step.seq_starts[s] || next > step.tokens) return {kSeqStartsUnordered, s + 1, next, step.tokens};
    const BatonFault fault = check_sequence(step, s);
    if (fault.code != kNone) return fault;
  }
  if (step.seq_starts[step.sequences] != step.tokens) {
    return {kSeqStartsUnordered, step.sequences, step.seq_starts[step.sequences], step.tokens};
  }
  for (int i = 0; i < step.logit_row_count; ++i) {
    const int row = step.logit_rows[i];
    if (row < 0 || row >= step.tokens) return {kLogitRowOutOfRange, i, row, step.tokens};
    if (i > 0 && row <= step.logit_rows[i - 1]) return {kLogitRowsUnordered, i, row, step.logit_rows[i - 1]};
  }
  return {kNone, 0, 0, 0};
}

}  // namespace baton
