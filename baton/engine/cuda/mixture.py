"""The mixture of experts on the GPU: rows sorted by expert, grouped matrix products, no word from the host.

All shapes depend on the number of rows alone and the groups' sizes stay on the device, so a step with experts can be
captured in a graph. With e4m3 weights a product's rows are rounded to e4m3 as well, each by its own largest magnitude:
a row once for all of its experts, and the activations in the launch that makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.engine.cuda.kernels import Kernels
from baton.engine.cuda.products import Linear
from baton.engine.spec import MoeSpec


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One layer's experts on the device, without biases; all products of one format."""

    router: torch.Tensor  # bf16 [experts, hidden]
    gate_up: Linear  # [experts, 2 * moe_ffn, hidden]
    down: Linear  # [experts, hidden, moe_ffn]


@dataclass(frozen=True, slots=True)
class _Rounded:
    """e4m3 ``values`` [rows, width] times float32 ``scales`` [rows]."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, width: int, device: torch.device) -> _Rounded:
        values = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
        return cls(values, torch.empty(rows, dtype=torch.float32, device=device))

    def __getitem__(self, rows: torch.Tensor) -> _Rounded:
        return _Rounded(self.values.view(torch.uint8)[rows].view(torch.float8_e4m3fn), self.scales[rows])


class Mixture:
    """Computes the experts of one layer after another.

    Needs sizes that are multiples of 16 bytes: of 8 for bf16, of 16 for e4m3. Groups may have any size, none at all
    included.
    """

    def __init__(self, moe: MoeSpec, kernels: Kernels, device: torch.device) -> None:
        self._moe = moe
        self._kernels = kernels
        self._experts = torch.arange(moe.experts, device=device)

    def forward(self, x: torch.Tensor, weights: ExpertWeights, out: torch.Tensor) -> None:
        """``out`` [rows, hidden] becomes the experts' weighted sum for x [rows, hidden], bf16."""
        rows, top_k = x.shape[0], self._moe.top_k
        chances, chosen = self._route(x, weights.router)
        by_expert, order = torch.sort(chosen.flatten(), stable=True)
        ends = torch.searchsorted(by_expert, self._experts, right=True).to(torch.int32)
        compute = self._in_bf16 if weights.gate_up.scale is None else self._in_fp8
        mixed = compute(x, order // top_k, ends, weights)
        by_row = torch.empty_like(mixed)
        by_row[order] = mixed
        out.copy_((by_row.view(rows, top_k, -1) * chances[:, :, None]).sum(dim=1))

    def _route(self, x: torch.Tensor, router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of every row and their shares, rounded as x is: [rows, top_k] each."""
        scores = torch.nn.functional.linear(x, router)
        chances, chosen = torch.softmax(scores.float(), dim=-1).topk(self._moe.top_k, dim=-1)
        if self._moe.renormalize:
            chances = chances / chances.sum(dim=-1, keepdim=True)
        return chances.to(x.dtype).float(), chosen

    def _in_bf16(self, x: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        """What the experts make of ``rows`` of x, those of expert e before ``ends[e]``: [len(rows), hidden]."""
        gate_up = torch.nn.functional.grouped_mm(x[rows], weights.gate_up.weight.transpose(-1, -2), offs=ends)
        gated = gate_up.new_empty(len(rows), self._moe.ffn_size)
        self._kernels.silu_mul(gate_up, gated)
        return torch.nn.functional.grouped_mm(gated, weights.down.weight.transpose(-1, -2), offs=ends)

    def _in_fp8(self, x: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        """``_in_bf16`` with e4m3 weights."""
        rounded = _Rounded.allocate(x.shape[0], x.shape[1], x.device)
        self._kernels.quantize(x, rounded.values, rounded.scales)
        gate_up = _multiply(rounded[rows], weights.gate_up, ends)
        gated = _Rounded.allocate(len(rows), self._moe.ffn_size, x.device)
        self._kernels.silu_mul_quant(gate_up, gated.values, gated.scales)
        return _multiply(gated, weights.down, ends)


def _multiply(x: _Rounded, by: Linear, ends: torch.Tensor) -> torch.Tensor:
    """bf16 [rows, n]: each group of rows times its expert's weight, scaled by row and by channel.

    By torch's kernel for Hopper, in the form that all of torch 2.11 to 2.13 have. Only n and k must be multiples of 16.
    """
    assert by.scale is not None
    return torch._scaled_grouped_mm(  # noqa: SLF001 # pyright: ignore[reportPrivateImportUsage]
        x.values,
        by.weight.transpose(-1, -2),
        x.scales,
        by.scale,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,  # as the dense products: what it loses is far below e4m3's own rounding
    )
