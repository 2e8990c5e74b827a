"""The row-wise work between the matrix products of a step: one launch each, on torch's current stream.

All tensors are contiguous and on one GPU; activations are bf16 with 16-byte aligned rows; T is the number of rows that
``out`` (or ``qkv``) has. Nothing allocates or synchronises, so every call can be captured in a CUDA graph. A row's
result does not depend on the other rows. Roundings are those of ``TorchDecoder`` in bf16.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p
from enum import IntEnum

import torch

from baton.engine.cuda.build import CudaUnavailable
from baton.engine.cuda.library import CudaLibrary, stream_lookup
from baton.engine.spec import DecoderSpec

E4M3_MAX = 448.0
_VECTOR = 8  # bf16 elements in one 16-byte access
_WIDEST_ROW = 32_768
_WIDEST_HEAD = 256


class Overlap(IntEnum):
    """Whether a kernel may start while its predecessor in the stream drains (programmatic dependent launch).

    With YES, what a step uploads (positions, slots, row indices) must be complete before its first kernel starts; that
    is the case for copies on the same stream, since ``Kernels.embed`` never overlaps them.
    """

    NO = 0
    YES = 1


class Kernels:
    """The kernels of ``src/rows.cu``, ``norm.cu``, ``rope.cu``, ``activation.cu`` and ``quantize.cu``."""

    def __init__(self, library: CudaLibrary, device: torch.device, overlap: Overlap = Overlap.YES) -> None:
        """Raises CudaUnavailable when ``device`` is no GPU or ``library`` lacks a kernel."""
        self._stream = stream_lookup(device)
        self._overlap = int(overlap)
        launch = (c_int, c_void_p)  # overlap, stream
        rope = (*(c_void_p,) * 8, *(c_int,) * 7, c_float)
        self._embed = library.declare("baton_embed", (*(c_void_p,) * 5, *(c_int,) * 3, c_void_p))
        self._gather_rows = library.declare("baton_gather_rows", (*(c_void_p,) * 3, *(c_int,) * 2, *launch))
        self._add_norm = library.declare("baton_add_norm", (*(c_void_p,) * 4, *(c_int,) * 2, c_float, *launch))
        self._add_norm_quant = library.declare(
            "baton_add_norm_quant", (*(c_void_p,) * 5, *(c_int,) * 2, c_float, *launch)
        )
        self._rope_append = library.declare("baton_rope_append", (*rope, *launch))
        self._rope_append_quant = library.declare("baton_rope_append_quant", (*rope, c_float, c_float, *launch))
        self._silu_mul = library.declare("baton_silu_mul", (*(c_void_p,) * 2, *(c_int,) * 2, *launch))
        self._silu_mul_quant = library.declare("baton_silu_mul_quant", (*(c_void_p,) * 3, *(c_int,) * 2, *launch))
        self._quantize = library.declare("baton_quantize_by_row", (*(c_void_p,) * 3, *(c_int,) * 2, *launch))

    def embed(
        self, tokens: torch.Tensor, sources: torch.Tensor, drawn: torch.Tensor, table: torch.Tensor, out: torch.Tensor
    ) -> None:
        """out[r] = table[drawn[sources[r]] if sources[r] >= 0 else tokens[r]].

        tokens, sources int32 [T]; drawn int32, the tokens that the previous step drew; table [vocab, hidden]; out
        [T, hidden]. A token outside the vocabulary gives a row of NaN.
        """
        rows, hidden = out.shape
        self._embed(
            *_addresses(tokens, sources, drawn, table, out),
            rows,
            table.shape[0],
            hidden,
            self._stream(),
        )

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """out[r] = x[rows[r]]: x [.., hidden], rows int32 [R], out [R, hidden]."""
        count, hidden = out.shape
        self._gather_rows(x.data_ptr(), rows.data_ptr(), out.data_ptr(), count, hidden, self._overlap, self._stream())

    def add_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """residual += x (unless x is None), then out = rms_norm(residual) * weight.

        x, residual and out [T, hidden], weight [hidden].
        """
        rows, hidden = out.shape
        self._add_norm(
            *_addresses(x, residual, weight, out),
            rows,
            hidden,
            eps,
            self._overlap,
            self._stream(),
        )

    def add_norm_quant(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """``add_norm`` to e4m3: out float8_e4m3fn [T, hidden], scales float32 [T], the row's maximum / 448."""
        rows, hidden = out.shape
        self._add_norm_quant(
            *_addresses(x, residual, weight, out, scales),
            rows,
            hidden,
            eps,
            self._overlap,
            self._stream(),
        )

    def rope_append(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        spec: DecoderSpec,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        pool: torch.Tensor,
        layer: int,
    ) -> None:
        """Norm (where the model has one) and rotate q in place and k, and put k and v into ``pool``.

        qkv [T, q_size + 2 * kv_size]; positions int32 [T]; slots int32 [T], block * block_size + offset, negative for a
        padding row, which is left alone; cos, sin float32 [context, head_dim / 2]; norms [head_dim]; pool bf16 [blocks,
        layers, 2, kv_heads, block_size, head_dim]. The k and v parts of qkv stay as they are.
        """
        inputs = (qkv, positions, slots, cos, sin, q_norm, k_norm, pool)
        self._rope_append(
            *_addresses(*inputs),
            *_rope_sizes(qkv, pool, spec, layer),
            self._overlap,
            self._stream(),
        )

    def rope_append_quant(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        spec: DecoderSpec,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        pool: torch.Tensor,
        layer: int,
        k_scale: float,
        v_scale: float,
    ) -> None:
        """``rope_append`` into a float8_e4m3fn pool that holds k / k_scale and v / v_scale, clipped at 448.

        The scales are frozen into a graph that captures the call.
        """
        inputs = (qkv, positions, slots, cos, sin, q_norm, k_norm, pool)
        self._rope_append_quant(
            *_addresses(*inputs),
            *_rope_sizes(qkv, pool, spec, layer),
            1.0 / k_scale,
            1.0 / v_scale,
            self._overlap,
            self._stream(),
        )

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """out = silu(gate) * up: gate_up [T, 2 * ffn] (gate, then up), out [T, ffn]."""
        rows, ffn = out.shape
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, ffn, self._overlap, self._stream())

    def silu_mul_quant(self, gate_up: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
        """``silu_mul`` to e4m3: out float8_e4m3fn [T, ffn], scales float32 [T], the row's maximum / 448."""
        rows, ffn = out.shape
        self._silu_mul_quant(
            gate_up.data_ptr(), out.data_ptr(), scales.data_ptr(), rows, ffn, self._overlap, self._stream()
        )

    def quantize(self, x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
        """x [T, width] to e4m3: out float8_e4m3fn [T, width], scales float32 [T], the row's maximum / 448."""
        rows, width = out.shape
        self._quantize(x.data_ptr(), out.data_ptr(), scales.data_ptr(), rows, width, self._overlap, self._stream())


def check_rows(spec: DecoderSpec) -> None:
    """Raises CudaUnavailable when the kernels do not take rows as wide as ``spec``'s."""
    widths = [("hidden_size", spec.hidden_size), ("ffn_size", spec.ffn_size)]
    if spec.moe is not None:
        widths.append(("moe.ffn_size", spec.moe.ffn_size))
    for field, width in widths:
        if width % _VECTOR or not 0 < width <= _WIDEST_ROW:
            raise CudaUnavailable(f"{field}: must be a multiple of {_VECTOR} up to {_WIDEST_ROW}, got {width}")
    if spec.head_dim % (2 * _VECTOR) or not 0 < spec.head_dim <= _WIDEST_HEAD:
        raise CudaUnavailable(
            f"head_dim: must be a multiple of {2 * _VECTOR} up to {_WIDEST_HEAD}, got {spec.head_dim}"
        )


def _addresses(*tensors: torch.Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _rope_sizes(
    qkv: torch.Tensor, pool: torch.Tensor, spec: DecoderSpec, layer: int
) -> tuple[int, int, int, int, int, int, int, float]:
    """The sizes in the order in which the rope kernels take them."""
    _, layers, _, kv_heads, block_size, head_dim = pool.shape
    return qkv.shape[0], spec.heads, kv_heads, head_dim, layers, block_size, layer, spec.norm_eps
