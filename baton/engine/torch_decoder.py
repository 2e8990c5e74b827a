"""The reference decoder: every feature of ``DecoderSpec`` in plain torch operations, on the CPU or a GPU.

In float32 on the CPU a row's logits do not depend on what else is in the step. Three measures make it so:

* matrix products run on row counts padded to a multiple of 16, from where on torch computes each row the same way;
* attention works on tiles of one fixed shape, at fixed absolute positions (``baton.engine.tiled_attention``);
* transcendental functions run on pieces whose length keeps every element in the vector loop (``baton.engine.exact``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from baton.engine.decoder import PackedStep, Weights
from baton.engine.exact import ROW_TILE, pad_rows, silu
from baton.engine.rope import rope_table
from baton.engine.spec import DecoderSpec, MoeSpec
from baton.engine.tiled_attention import TiledAttention


class TorchDecoder:
    """``Decoder`` over canonical ``weights`` that all have ``dtype`` and lie on one device."""

    def __init__(self, spec: DecoderSpec, weights: Weights, dtype: torch.dtype) -> None:
        self.spec = spec
        self.dtype = dtype
        self._weights = dict(weights)
        self._device = self._weights["embed.weight"].device
        self._cos, self._sin = (table.to(self._device) for table in rope_table(spec))

    def forward(self, step: PackedStep, pool: torch.Tensor) -> torch.Tensor:
        """See ``Decoder.forward``. Raises as ``fill`` does."""
        return self.fill(step, pool)()

    @torch.inference_mode()
    def fill(self, step: PackedStep, pool: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See ``Decoder.fill``; all is computed at once. Raises ValueError when the step does not fit pool or model."""
        check_step(self.spec, step, pool)
        rows = step.token_ids.shape[0]
        positions = step.positions.to(self._device, torch.int64)
        attention = TiledAttention(self.spec, step, pool)
        cos, sin = self._cos[positions][:, None, :], self._sin[positions][:, None, :]
        x = pad_rows(self._weights["embed.weight"][step.token_ids.to(self._device, torch.int64)], ROW_TILE)
        for layer in range(self.spec.layers):
            name = f"layers.{layer}"
            q, k, v = self._qkv(self._norm(x, f"{name}.attn_norm"), name, rows)
            attention.write(layer, _rotate(k, cos, sin), v)
            mixed = attention.attend(layer, _rotate(q, cos, sin)).to(self.dtype)
            x = x + self._linear(pad_rows(mixed, ROW_TILE), f"{name}.output")
            normed = self._norm(x, f"{name}.mlp_norm")
            moe = self.spec.moe
            x = x + (self._feed_forward(normed, name) if moe is None else self._mixture(normed[:rows], name, moe))
        logits = self._logits(x[step.logit_rows.to(self._device, torch.int64)])
        return lambda: logits

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        head = "embed" if self.spec.tied_head else "head"
        rows = x.shape[0]
        return self._linear(self._norm(pad_rows(x, ROW_TILE), "final_norm"), head)[:rows].float()

    def _qkv(self, x: torch.Tensor, name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]; q and k normalised where the model does."""
        spec = self.spec
        fused = self._linear(x, f"{name}.qkv")[:rows]
        q, k, v = fused.split([spec.q_size, spec.kv_size, spec.kv_size], dim=-1)
        q = q.reshape(rows, spec.heads, spec.head_dim)
        k = k.reshape(rows, spec.kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        return q, k, v.reshape(rows, spec.kv_heads, spec.head_dim)

    def _feed_forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = self._linear(x, f"{name}.gate_up").chunk(2, dim=-1)
        return self._linear(silu(gate) * up, f"{name}.down")

    def _mixture(self, x: torch.Tensor, name: str, moe: MoeSpec) -> torch.Tensor:
        """Experts in the order of their ids, so a row's sum has one order whatever else is in the step."""
        rows = x.shape[0]
        scores = self._linear(pad_rows(x, ROW_TILE), f"{name}.router")[:rows]
        chances, chosen = torch.softmax(scores.float(), dim=-1).topk(moe.top_k, dim=-1)
        if moe.renormalize:
            chances = chances / chances.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(x)
        for expert in range(moe.experts):
            row, rank = torch.where(chosen == expert)
            if row.numel() == 0:
                continue
            gate_up = self._expert_linear(pad_rows(x[row], ROW_TILE), f"{name}.experts.gate_up", expert)
            gate, up = gate_up.chunk(2, dim=-1)
            out = self._expert_linear(silu(gate) * up, f"{name}.experts.down", expert)[: row.numel()]
            mixed[row] += out * chances[row, rank, None].to(self.dtype)
        return pad_rows(mixed, ROW_TILE)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = linear(x, self._weights[f"{name}.weight"])
        bias = self._weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _expert_linear(self, x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        return linear(x, self._weights[f"{name}.weight"][expert])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.spec.norm_eps)
        return (wide * scale).to(self.dtype) * self._weights[f"{name}.weight"]


def check_step(spec: DecoderSpec, step: PackedStep, pool: torch.Tensor) -> None:
    """Refuse a step that would read or write outside the pool, the vocabulary or the context."""
    expected = (spec.layers, 2, spec.kv_heads, pool.shape[4], spec.head_dim)
    if pool.shape[1:] != expected:
        raise ValueError(f"pool: expected [blocks, {', '.join(map(str, expected))}], got {list(pool.shape)}")
    for name, tensor, limit in (
        ("token_ids", step.token_ids, spec.vocab_size),
        ("positions", step.positions, min(spec.context_length, step.block_tables.shape[1] * pool.shape[4])),
        ("block_tables", step.block_tables, pool.shape[0]),
        ("logit_rows", step.logit_rows, step.token_ids.shape[0]),
    ):
        if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < limit:
            raise ValueError(f"{name}: must be in [0, {limit}), got {int(tensor.min())} to {int(tensor.max())}")


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [rows, heads, head_dim] in the half-split layout; cos and sin [rows, 1, head_dim / 2]."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
