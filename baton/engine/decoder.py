"""The seam between the runner and whatever computes the model: one packed step in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.engine.spec import DecoderSpec

# Canonical weight names, the same for every architecture (a model file maps its own names onto these). Linear weights
# are [out, in] as in torch.nn.Linear. `{i}` is the layer, `{e}` the expert.
#   embed.weight [vocab, hidden]     final_norm.weight [hidden]     head.weight [vocab, hidden] (absent when tied)
#   layers.{i}.attn_norm.weight [hidden]      layers.{i}.mlp_norm.weight [hidden]
#   layers.{i}.qkv.weight [q_size + 2 * kv_size, hidden] (q rows, then k, then v)    layers.{i}.qkv.bias  (if qkv_bias)
#   layers.{i}.q_norm.weight [head_dim]       layers.{i}.k_norm.weight [head_dim]                   (if qk_norm)
#   layers.{i}.output.weight [hidden, q_size]                                  layers.{i}.output.bias (if output_bias)
#   layers.{i}.gate_up.weight [2 * ffn, hidden] (gate rows, then up)           layers.{i}.gate_up.bias  (if mlp_bias)
#   layers.{i}.down.weight [hidden, ffn]                                       layers.{i}.down.bias     (if mlp_bias)
#   layers.{i}.router.weight [experts, hidden]   layers.{i}.experts.gate_up.weight [experts, 2 * moe_ffn, hidden]
#   layers.{i}.experts.down.weight [experts, hidden, moe_ffn]                                                (if moe)
Weights = Mapping[str, torch.Tensor]


UNLIMITED = 2**31 - 1  # in ``PackedStep.windows``: as the model


@dataclass(frozen=True, slots=True)
class PackedStep:
    """New tokens of all sequences of one step, concatenated without padding. All tensors int32, on the CPU.

    Before the call the KV of positions ``[0, positions[seq_starts[s]])`` of sequence s is in its blocks; the call
    writes the KV of the new tokens and attends causally (within ``spec.sliding_window`` and
    ``windows``, where they are set; a token sees itself).
    """

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T], consecutive inside a sequence
    seq_starts: torch.Tensor  # [S + 1], row at which each sequence begins; the last entry is T
    block_tables: torch.Tensor  # [S, W], block ids; entries past a sequence's need are 0 and never read
    logit_rows: torch.Tensor  # [R], the rows whose logits are wanted, ascending
    windows: torch.Tensor | None = None  # [S], tokens that a sequence's own rows see at most; None: as the model


class Decoder(Protocol):
    """Computes a step. Implementations: ``TorchDecoder`` (reference) and ``NativeDecoder`` (C++ kernels, CPU).

    In float32 a row's logits are the same bits alone, in any batch and for any chunking of the prompt.
    """

    spec: DecoderSpec
    dtype: torch.dtype

    def forward(self, step: PackedStep, pool: torch.Tensor) -> torch.Tensor:
        """Run one step and return float32 logits [R, vocab].

        ``pool`` is the paged KV cache, [blocks, layers, 2 (K, V), kv_heads, block_size, head_dim] in ``dtype``,
        contiguous, block-major: one block is one contiguous run of bytes.
        """
        ...

    def fill(self, step: PackedStep, pool: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The first half of ``forward``: when it returns, all of the step's KV is in ``pool``. Raises what ``forward``
        raises.

        What it returns is the second half, which returns the logits, float32 [R, vocab]: to be called at most once, and
        before any other step. Until then the step's tensors must not change.
        """
        ...
