"""A layer's matrix products with the row-wise work that makes their operands: in bf16, or with e4m3 weights.

With e4m3 weights a product's other operand is rounded to e4m3 too, each row by its own largest magnitude, in the same
launch as the norm or the activation before it. Everything queues on torch's current stream and nothing allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from baton.engine.cuda.gemm import Gemm
from baton.engine.cuda.gemv import Norm
from baton.engine.cuda.kernels import Kernels
from baton.engine.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Linear:
    """The weights of one product: ``weight`` [n, k] bf16, or e4m3 with ``scale`` float32 [n]; ``bias`` bf16 [n].

    Of experts, [experts, n, k] and [experts, n].
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None


class Products(Protocol):
    """Rows are bf16 going in and coming out; [rows, k] times ``by`` to ``out`` [rows, n]."""

    def linear(self, x: torch.Tensor, by: Linear, out: torch.Tensor) -> None: ...

    def norm_linear(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, by: Linear, out: torch.Tensor
    ) -> None:
        """residual += x, unless x is None; then the product of the normed residual."""
        ...

    def silu_linear(self, gate_up: torch.Tensor, by: Linear, out: torch.Tensor) -> None:
        """The product of silu(gate) * up: gate_up [rows, 2 * k]."""
        ...


class Bf16Products:
    """``Products`` whose operands are bf16. The scratch buffers are [rows, hidden] and [rows, ffn]."""

    def __init__(self, kernels: Kernels, gemm: Gemm, normed: torch.Tensor, gated: torch.Tensor) -> None:
        self._kernels = kernels
        self._gemm = gemm
        self._normed = normed
        self._gated = gated

    def linear(self, x: torch.Tensor, by: Linear, out: torch.Tensor) -> None:
        """See ``Products``."""
        self._gemm.linear(x, by.weight, out, by.bias)

    def norm_linear(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, by: Linear, out: torch.Tensor
    ) -> None:
        """See ``Products``."""
        normed = self._normed[: residual.shape[0]]
        self._kernels.add_norm(x, residual, norm.gain, norm.eps, normed)
        self._gemm.linear(normed, by.weight, out, by.bias)

    def silu_linear(self, gate_up: torch.Tensor, by: Linear, out: torch.Tensor) -> None:
        """See ``Products``."""
        gated = self._gated[: gate_up.shape[0]]
        self._kernels.silu_mul(gate_up, gated)
        self._gemm.linear(gated, by.weight, out, by.bias)


class Fp8Products:
    """``Products`` whose weights are e4m3, for at most ``rows`` rows."""

    def __init__(self, kernels: Kernels, gemm: Gemm, spec: DecoderSpec, rows: int, device: torch.device) -> None:
        self._kernels = kernels
        self._gemm = gemm
        self._values = {
            width: torch.zeros((rows, width), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
            for width in {spec.hidden_size, spec.q_size, *([spec.ffn_size] if spec.moe is None else [])}
        }
        self._scales = torch.ones(rows, dtype=torch.float32, device=device)

    def linear(self, x: torch.Tensor, by: Linear, out: torch.Tensor) -> None:
        """See ``Products``."""
        values = self._operand(by, x.shape[0])
        self._kernels.quantize(x, values, self._scales)
        self._multiply(values, by, out)

    def norm_linear(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, by: Linear, out: torch.Tensor
    ) -> None:
        """See ``Products``."""
        values = self._operand(by, residual.shape[0])
        self._kernels.add_norm_quant(x, residual, norm.gain, norm.eps, values, self._scales)
        self._multiply(values, by, out)

    def silu_linear(self, gate_up: torch.Tensor, by: Linear, out: torch.Tensor) -> None:
        """See ``Products``."""
        values = self._operand(by, gate_up.shape[0])
        self._kernels.silu_mul_quant(gate_up, values, self._scales)
        self._multiply(values, by, out)

    def _operand(self, by: Linear, rows: int) -> torch.Tensor:
        return self._values[by.weight.shape[1]][:rows]

    def _multiply(self, values: torch.Tensor, by: Linear, out: torch.Tensor) -> None:
        assert by.scale is not None
        self._gemm.linear_fp8(values, self._scales, by.weight, by.scale, out, by.bias)
