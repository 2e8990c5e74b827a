"""The mixture of experts on the GPU: rows sorted by expert, one grouped matrix product, no word from the host.

All shapes depend on the number of rows alone and the groups' sizes stay on the device, so a step with experts can be
captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.engine.cuda.kernels import Kernels
from baton.engine.spec import MoeSpec


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One layer's experts, bf16 on the device."""

    router: torch.Tensor  # [experts, hidden]
    gate_up: torch.Tensor  # [experts, 2 * moe_ffn, hidden]
    down: torch.Tensor  # [experts, hidden, moe_ffn]


class Mixture:
    """Computes the experts of one layer after another. Needs sizes that are multiples of 8 (16-byte rows)."""

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
        picked = x[order // top_k]
        gate_up = torch.nn.functional.grouped_mm(picked, weights.gate_up.transpose(-1, -2), offs=ends)
        gated = gate_up.new_empty(rows * top_k, self._moe.ffn_size)
        self._kernels.silu_mul(gate_up, gated)
        mixed = torch.nn.functional.grouped_mm(gated, weights.down.transpose(-1, -2), offs=ends)
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
