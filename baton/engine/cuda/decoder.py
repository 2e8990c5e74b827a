"""One forward pass on the GPU over buffers that are allocated once: embedding to logits, captured or launched eagerly.

Rounding points are those of ``TorchDecoder`` in bf16. Attention is the caller's: it differs between a captured decode
batch and a step with prefill chunks, and is planned outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from baton.engine.cuda.attention_shape import KvScale
from baton.engine.cuda.gemm import Gemm
from baton.engine.cuda.gemv import Norm
from baton.engine.cuda.kernels import Kernels
from baton.engine.cuda.mixture import ExpertWeights, Mixture
from baton.engine.cuda.products import Bf16Products, Fp8Products, Linear, Products
from baton.engine.decoder import Weights
from baton.engine.rope import rope_table
from baton.engine.spec import DecoderSpec

Attend = Callable[[int], None]
"""Computes one layer's attention from the step's rows of ``Activations.qkv`` into those of ``Activations.mixed``."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer on the device, norms and biases bf16; None where the model has no such tensor."""

    attn_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear | None
    down: Linear | None
    experts: ExpertWeights | None

    @classmethod
    def take(cls, weights: Weights, layer: int) -> LayerWeights:
        """The canonical tensors of ``layer``, with the scales that ``fp8_weights`` adds to them."""

        def find(name: str) -> torch.Tensor | None:
            return weights.get(f"layers.{layer}.{name}")

        def need(name: str) -> torch.Tensor:
            return weights[f"layers.{layer}.{name}"]

        def linear(name: str) -> Linear:
            return Linear(need(f"{name}.weight"), find(f"{name}.bias"), find(f"{name}.scale"))

        experts = None
        if find("router.weight") is not None:
            experts = ExpertWeights(need("router.weight"), linear("experts.gate_up"), linear("experts.down"))
        return cls(
            attn_norm=need("attn_norm.weight"),
            qkv=linear("qkv"),
            q_norm=find("q_norm.weight"),
            k_norm=find("k_norm.weight"),
            output=linear("output"),
            mlp_norm=need("mlp_norm.weight"),
            gate_up=linear("gate_up") if experts is None else None,
            down=linear("down") if experts is None else None,
            experts=experts,
        )


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, int32 on the device, [rows] each: views of ``StepArrays``."""

    token_ids: torch.Tensor
    sources: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecoderLimits:
    """The largest step: ``rows`` of it, and ``logit_rows`` whose logits are computed at once."""

    rows: int
    logit_rows: int


@dataclass(frozen=True, slots=True)
class Activations:
    """Every intermediate result of a step, bf16 [rows, ...]; ``allocate`` makes buffers, ``first`` views of them."""

    residual: torch.Tensor
    normed: torch.Tensor
    projected: torch.Tensor
    qkv: torch.Tensor
    mixed: torch.Tensor  # what attention yields
    gate_up: torch.Tensor
    gated: torch.Tensor

    @classmethod
    def allocate(cls, spec: DecoderSpec, rows: int, device: torch.device) -> Activations:
        """Zeroed buffers. Rows that a captured step pads with are computed on too, so they must start finite."""
        ffn = spec.ffn_size if spec.moe is None else 0
        hidden, qkv = spec.hidden_size, spec.q_size + 2 * spec.kv_size
        widths = (hidden, hidden, hidden, qkv, spec.q_size, 2 * ffn, ffn)
        return cls(*(torch.zeros((rows, width), dtype=torch.bfloat16, device=device) for width in widths))

    def first(self, rows: int) -> Activations:
        return Activations(*(getattr(self, field.name)[:rows] for field in fields(self)))


class CudaDecoder:
    """A model's weights and the order in which they are applied. Launches on torch's current stream, never waits."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        kernels: Kernels,
        gemm: Gemm,
        limits: DecoderLimits,
        drawn: torch.Tensor,
    ) -> None:
        """``drawn`` int32 [logit_rows]: the tokens that the previous step drew, by row, which ``sources`` name."""
        self.spec = spec
        self._kernels = kernels
        self._gemm = gemm
        self._drawn = drawn
        self._layers = [LayerWeights.take(weights, layer) for layer in range(spec.layers)]
        self._embedding = weights["embed.weight"]
        self._head = self._embedding if spec.tied_head else weights["head.weight"]
        self._final_norm = weights["final_norm.weight"]
        device = drawn.device
        self._cos, self._sin = (table.to(device) for table in rope_table(spec))
        self._mixture = None if spec.moe is None else Mixture(spec.moe, kernels, device)
        self.activations = Activations.allocate(spec, limits.rows, device)
        self._products = self._choose_products(limits.rows, device)
        self._wanted_residual = torch.zeros_like(self.activations.residual[: limits.logit_rows])
        self._wanted_mixed = torch.zeros_like(self.activations.mixed[: limits.logit_rows])
        self._logits = torch.zeros((limits.logit_rows, spec.vocab_size), dtype=torch.bfloat16, device=device)

    @property
    def logit_rows(self) -> int:
        """The most rows whose logits can be computed at once."""
        return self._logits.shape[0]

    def hidden(self, rows: StepRows, pool: torch.Tensor, attend: Attend) -> torch.Tensor:
        """All rows of the step after the final norm, bf16 [rows, hidden]. Writes the rows' KV into ``pool``."""
        a = self._through_attention(rows, pool, attend)
        return self._finish(a)

    def wanted_hidden(self, rows: StepRows, wanted: torch.Tensor, pool: torch.Tensor, attend: Attend) -> torch.Tensor:
        """``hidden`` of the rows ``wanted`` (int32, at most ``logit_rows``); the others end with the last attention."""
        a = self._through_attention(rows, pool, attend)
        kept = wanted.shape[0]
        if not kept:
            return a.normed[:0]
        wanted_residual, wanted_mixed = self._wanted_residual[:kept], self._wanted_mixed[:kept]
        self._kernels.gather_rows(a.residual, wanted, wanted_residual)
        self._kernels.gather_rows(a.mixed, wanted, wanted_mixed)
        return self._finish(replace(a.first(kept), residual=wanted_residual, mixed=wanted_mixed))

    def decode(self, rows: StepRows, pool: torch.Tensor, attend: Attend) -> torch.Tensor:
        """All rows of the step (at most ``logit_rows``) to bf16 logits [rows, vocab], by the shortest chain for few."""
        if self._mixture is None and self._gemm.supports(rows.token_ids.shape[0]):
            return self._decode_few(rows, pool, attend)
        return self.logits(self.hidden(rows, pool, attend))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """bf16 [rows, vocab] of at most ``logit_rows`` rows; the buffer is the next call's too."""
        logits = self._logits[: hidden.shape[0]]
        self._gemm.linear(hidden, self._head, logits)
        return logits

    def _through_attention(self, rows: StepRows, pool: torch.Tensor, attend: Attend) -> Activations:
        """All layers, the last one as far as its attention."""
        a = self.activations.first(rows.token_ids.shape[0])
        self._kernels.embed(rows.token_ids, rows.sources, self._drawn, self._embedding, a.residual)
        for index, layer in enumerate(self._layers):
            before = a.projected if index else None
            self._products.norm_linear(before, a.residual, self._norm_by(layer.attn_norm), layer.qkv, a.qkv)
            self._rope(index, rows, pool, a)
            attend(index)
            if index < len(self._layers) - 1:
                self._after_attention(layer, a)
        return a

    def _finish(self, a: Activations) -> torch.Tensor:
        self._after_attention(self._layers[-1], a)
        self._norm(a.projected, a, self._final_norm)
        return a.normed

    def _after_attention(self, layer: LayerWeights, a: Activations) -> None:
        """From ``mixed`` to ``projected``, which the next norm adds to the residual."""
        self._products.linear(a.mixed, layer.output, a.projected)
        if layer.experts is not None and self._mixture is not None:
            self._norm(a.projected, a, layer.mlp_norm)
            self._mixture.forward(a.normed, layer.experts, a.projected)
            return
        assert layer.gate_up is not None
        assert layer.down is not None
        self._products.norm_linear(a.projected, a.residual, self._norm_by(layer.mlp_norm), layer.gate_up, a.gate_up)
        self._products.silu_linear(a.gate_up, layer.down, a.projected)

    def _decode_few(self, rows: StepRows, pool: torch.Tensor, attend: Attend) -> torch.Tensor:
        """``decode`` with norms, activation and residual sums inside the matrix products."""
        a = self.activations.first(rows.token_ids.shape[0])
        logits = self._logits[: rows.token_ids.shape[0]]
        gemm = self._gemm
        self._kernels.embed(rows.token_ids, rows.sources, self._drawn, self._embedding, a.residual)
        for index, layer in enumerate(self._layers):
            assert layer.gate_up is not None
            assert layer.down is not None
            qkv, output, gate_up, down = layer.qkv, layer.output, layer.gate_up, layer.down
            attn_norm, mlp_norm = self._norm_by(layer.attn_norm), self._norm_by(layer.mlp_norm)
            gemm.norm_linear(a.residual, attn_norm, qkv.weight, a.qkv, qkv.bias, qkv.scale)
            self._rope(index, rows, pool, a)
            attend(index)
            gemm.linear_add(a.mixed, output.weight, a.residual, output.bias, output.scale)
            gemm.norm_gate_up_silu(a.residual, mlp_norm, gate_up.weight, a.gated, gate_up.bias, gate_up.scale)
            gemm.linear_add(a.gated, down.weight, a.residual, down.bias, down.scale)
        gemm.norm_linear(a.residual, self._norm_by(self._final_norm), self._head, logits)
        return logits

    def _rope(self, index: int, rows: StepRows, pool: torch.Tensor, a: Activations) -> None:
        """Rotate q and k, and put the step's KV of one layer into ``pool``."""
        layer, spec = self._layers[index], self.spec
        steps = (a.qkv, rows.positions, rows.slots, self._cos, self._sin)
        if pool.dtype != torch.float8_e4m3fn:
            self._kernels.rope_append(*steps, spec, layer.q_norm, layer.k_norm, pool, index)
            return
        scale = KvScale()  # e4m3 is a floating format: keys and values up to 448 need none, what is larger is clipped
        self._kernels.rope_append_quant(*steps, spec, layer.q_norm, layer.k_norm, pool, index, scale.k, scale.v)

    def _choose_products(self, rows: int, device: torch.device) -> Products:
        """By the weights' format."""
        if self._layers[0].qkv.scale is None:
            return Bf16Products(self._kernels, self._gemm, self.activations.normed, self.activations.gated)
        return Fp8Products(self._kernels, self._gemm, self.spec, rows, device)

    def _norm_by(self, gain: torch.Tensor) -> Norm:
        return Norm(gain, self.spec.norm_eps)

    def _norm(self, x: torch.Tensor | None, a: Activations, weight: torch.Tensor) -> None:
        self._kernels.add_norm(x, a.residual, weight, self.spec.norm_eps, a.normed)
