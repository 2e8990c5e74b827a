"""Experts with e4m3 weights: what is multiplied with what, with the GPU's kernels in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.engine.cuda.fp8_weights import quantize_channels
from baton.engine.cuda.mixture import ExpertWeights, Mixture
from baton.engine.cuda.products import Linear
from baton.engine.spec import MoeSpec
from tests.unit.engine.cuda.cpu_doubles import TorchKernels

E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0
HIDDEN, FFN, EXPERTS = 64, 48, 8


class RoundingKernels(TorchKernels):
    """``Kernels`` that round rows to e4m3."""

    def quantize(self, x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
        assert (out.shape, scales.shape) == (x.shape, x.shape[:1])
        largest = x.float().abs().amax(dim=1).clamp_min(1e-30)
        scales.copy_(largest / E4M3_MAX)
        out.copy_((x.float() * (E4M3_MAX / largest)[:, None]).to(E4M3))

    def silu_mul_quant(self, gate_up: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        self.quantize(torch.nn.functional.silu(gate) * up, out, scales)


def scaled_grouped_mm(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, *, offs: torch.Tensor, **how: Any
) -> torch.Tensor:
    """torch's, which has no kernel for CPUs; what it takes is checked by its own rules, on the meta device."""
    on_meta = [tensor.to("meta") for tensor in (a, b, a_scale, b_scale, offs)]
    checked = MULTIPLY(on_meta[0], on_meta[1], on_meta[2], on_meta[3], offs=on_meta[4], **how)
    assert offs.dtype == torch.int32
    assert int(offs[-1]) == len(a)
    out = torch.empty(checked.shape, dtype=checked.dtype)
    first = 0
    for expert, last in enumerate(offs.tolist()):
        rows = slice(first, last)
        left = a[rows].float() * a_scale[rows, None]
        out[rows] = (left @ (b[expert].float() * b_scale[expert][None, :])).to(out.dtype)
        first = last
    return out


MULTIPLY = torch._scaled_grouped_mm  # pyright: ignore[reportPrivateImportUsage]


def experts_of(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16 router, gate_up and down."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16)

    return drawn(EXPERTS, HIDDEN) * 4, drawn(EXPERTS, 2 * FFN, HIDDEN), drawn(EXPERTS, HIDDEN, FFN)


@pytest.mark.parametrize("rows", [1, 2, 7, 50])
@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_in_fp8_say_what_they_say_in_bf16(
    rows: int, renormalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding; with few rows most experts have none."""
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    router, gate_up, down = experts_of(rows)
    kernels: Any = RoundingKernels()
    mixture = Mixture(MoeSpec(EXPERTS, 3, FFN, renormalize), kernels, torch.device("cpu"))
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    x *= torch.logspace(-1, 1, rows)[:, None].to(torch.bfloat16)
    plain, rounded = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16), torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)
    mixture.forward(x, ExpertWeights(router, Linear(gate_up), Linear(down)), plain)
    in_fp8 = [Linear(values, scale=scale) for values, scale in map(quantize_channels, (gate_up, down))]
    mixture.forward(x, ExpertWeights(router, *in_fp8), rounded)
    errors = (rounded.float() - plain.float()).norm(dim=1) / plain.float().norm(dim=1)
    assert not errors.isnan().any()
    # Each of the four operands loses 2.6 % by rounding, those of the first product twice over: 6.4 % together.
    assert 0.04 < errors.mean() < 0.09
    assert errors.max() < 0.2


def test_rows_without_magnitude_stay_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    router, gate_up, down = experts_of(1)
    kernels: Any = RoundingKernels()
    mixture = Mixture(MoeSpec(EXPERTS, 2, FFN, renormalize=True), kernels, torch.device("cpu"))
    in_fp8 = [Linear(values, scale=scale) for values, scale in map(quantize_channels, (gate_up, down))]
    out = torch.full((3, HIDDEN), float("nan"), dtype=torch.bfloat16)
    mixture.forward(torch.zeros(3, HIDDEN, dtype=torch.bfloat16), ExpertWeights(router, *in_fp8), out)
    assert not out.any()
