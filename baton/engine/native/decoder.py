"""``NativeDecoder``: the ``Decoder`` of the CPU, two C++ calls per step."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from baton.core.errors import InvalidRequest, ModelError
from baton.engine.decoder import UNLIMITED, PackedStep, Weights
from baton.engine.native.build import NativeUnavailable, build
from baton.engine.native.library import Fault, FaultCode, Shape, Step, Weight, open_library
from baton.engine.rope import inverse_frequencies
from baton.engine.spec import DecoderSpec

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
_LANES = 16

# What the fields of a fault mean: index, value, limit.
_FAULTS = {
    FaultCode.WINDOW_OUT_OF_RANGE: ("windows", "windows[{index}] must be at least {limit}, got {value}"),
    FaultCode.TOKEN_OUT_OF_RANGE: ("token_ids", "token_ids[{index}] must be in [0, {limit}), got {value}"),
    FaultCode.POSITION_OUT_OF_RANGE: ("positions", "positions[{index}] must be in [0, {limit}), got {value}"),
    FaultCode.POSITION_NOT_CONSECUTIVE: ("positions", "positions[{index}] must be {limit}, got {value}"),
    FaultCode.SEQ_STARTS_UNORDERED: ("seq_starts", "seq_starts must ascend from 0 to {limit}, [{index}] is {value}"),
    FaultCode.TABLE_TOO_NARROW: ("block_tables", "sequence {index} needs {limit} blocks, its table has {value}"),
    FaultCode.BLOCK_OUT_OF_RANGE: ("block_tables", "sequence {index}: blocks must be in [0, {limit}), got {value}"),
    FaultCode.LOGIT_ROW_OUT_OF_RANGE: ("logit_rows", "logit_rows[{index}] must be in [0, {limit}), got {value}"),
    FaultCode.LOGIT_ROWS_UNORDERED: ("logit_rows", "logit_rows[{index}] must be above {limit}, got {value}"),
    FaultCode.OUT_OF_MEMORY: ("token_ids", "no memory for a step of {value} tokens"),
}


class NativeDecoder:
    """``Decoder`` over the C++ kernels, in float32 or bfloat16 (products and sums are float32 in both).

    The weights are packed into the kernels' own memory one by one and not kept: a mapping that reads them on demand
    holds the peak at one copy of the model. ``threads`` counts the caller's own; steps of one or two rows use one less.
    Not safe for concurrent calls.
    """

    def __init__(
        self, spec: DecoderSpec, weights: Weights, dtype: torch.dtype, threads: int = 2, library: Path | None = None
    ) -> None:
        """``library`` is what ``build`` returned; by default it is built here.

        Raises NativeUnavailable when the kernels cannot be built or do not support the model, and ModelError when a
        weight is missing, has another shape than ``spec`` says, or memory does not suffice.
        """
        _check_supported(spec, dtype, threads)
        self.spec = spec
        self.dtype = dtype
        self._library = open_library(build() if library is None else library)
        self._model = self._library.baton_native_open(_shape(spec, dtype, threads))
        if not self._model:
            raise ModelError(f"model: no memory for the weights of {spec.architecture}, or for {threads} threads")
        self._filled: PackedStep | None = None  # the step that was filled last
        self._close = weakref.finalize(self, self._library.baton_native_close, self._model)
        for kind, layer, name, shape in _expected(spec):
            self._load(kind, layer, _take(weights, name, shape, _storage(kind, dtype)))
        self._load(Weight.ROPE_FREQUENCIES, 0, inverse_frequencies(spec.rope, spec.head_dim).contiguous())

    @property
    def lanes(self) -> str:
        """Which kernels run here: "avx512bf16", "avx512", "avx2" or "generic"."""
        return self._library.baton_native_lanes().decode()

    def forward(self, step: PackedStep, pool: torch.Tensor) -> torch.Tensor:
        """See ``Decoder.forward``. Raises as ``fill`` does."""
        return self.fill(step, pool)()

    def fill(self, step: PackedStep, pool: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See ``Decoder.fill``. Raises InvalidRequest naming what in the step is wrong; nothing is written then."""
        self._check_pool(pool)
        _check_tensors(step)
        logits = torch.empty(step.logit_rows.numel(), self.spec.vocab_size, dtype=torch.float32)
        if step.token_ids.numel() == 0:
            return lambda: logits
        arguments = Step(
            step.token_ids.data_ptr(),
            step.positions.data_ptr(),
            step.seq_starts.data_ptr(),
            step.block_tables.data_ptr(),
            step.logit_rows.data_ptr(),
            None if step.windows is None else step.windows.data_ptr(),
            step.token_ids.numel(),
            step.seq_starts.numel() - 1,
            step.block_tables.shape[1],
            step.logit_rows.numel(),
            pool.shape[0],
            pool.shape[4],
            self.spec.context_length,
            pool.data_ptr(),
            logits.data_ptr(),
        )
        fault = self._library.baton_native_fill(self._model, ctypes.byref(arguments))
        if fault.code != FaultCode.NONE:
            raise _invalid(fault)

        self._filled = step
        return partial(self._finish, step, logits)

    def _finish(self, step: PackedStep, logits: torch.Tensor) -> torch.Tensor:
        """``step`` is not read here: its arrays have to stay until now."""
        assert step is self._filled, "another step was begun before this one was finished"
        self._library.baton_native_finish(self._model)
        return logits

    def close(self) -> None:
        """Free the weights and end the threads. The decoder cannot be used afterwards."""
        self._close()

    def _load(self, kind: Weight, layer: int, tensor: torch.Tensor) -> None:
        """Pack one weight; experts one by one."""
        parts = tensor if kind in (Weight.EXPERT_GATE_UP, Weight.EXPERT_DOWN) else (tensor,)
        for expert, part in enumerate(parts):
            if self._library.baton_native_load(self._model, kind, layer, expert, part.data_ptr()) != 0:
                raise ModelError(f"model: no memory to pack {kind.name.lower()} of layer {layer}")

    def _check_pool(self, pool: torch.Tensor) -> None:
        spec = self.spec
        expected = (spec.layers, 2, spec.kv_heads, spec.head_dim)
        if pool.dim() != 6 or (*pool.shape[1:4], pool.shape[5]) != expected:
            wanted = f"[blocks, {spec.layers}, 2, {spec.kv_heads}, block_size, {spec.head_dim}]"
            raise InvalidRequest(f"pool: must be {wanted}, got {list(pool.shape)}", field="pool")
        if pool.dtype != self.dtype or not pool.is_contiguous() or pool.device.type != "cpu":
            raise InvalidRequest(
                f"pool: must be contiguous {self.dtype} on the CPU, got {pool.dtype} on {pool.device}, "
                f"contiguous: {pool.is_contiguous()}",
                field="pool",
            )


def _check_supported(spec: DecoderSpec, dtype: torch.dtype, threads: int) -> None:
    if dtype not in _ELEMENTS:
        raise NativeUnavailable(f"native kernels: dtype must be float32 or bfloat16, got {dtype}")
    if threads < 1:
        raise InvalidRequest.out_of_range("threads", threads, "must be at least 1")
    ffn = spec.ffn_size if spec.moe is None else spec.moe.ffn_size
    for name, value, unit in (
        ("hidden_size", spec.hidden_size, _LANES),
        ("ffn_size", ffn, _LANES),
        ("head_dim", spec.head_dim, 2 * _LANES),
        ("heads", spec.heads, spec.kv_heads),
    ):
        if value % unit != 0:
            raise NativeUnavailable(f"native kernels: {name} must be a multiple of {unit}, got {value}")


def _shape(spec: DecoderSpec, dtype: torch.dtype, threads: int) -> Shape:
    moe = spec.moe
    return Shape(
        element=_ELEMENTS[dtype],
        threads=threads,
        vocab=spec.vocab_size,
        hidden=spec.hidden_size,
        ffn=spec.ffn_size,
        layers=spec.layers,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        window=UNLIMITED if spec.sliding_window is None else spec.sliding_window,
        tied_head=spec.tied_head,
        experts=0 if moe is None else moe.experts,
        top_k=0 if moe is None else moe.top_k,
        expert_ffn=0 if moe is None else moe.ffn_size,
        renormalize=moe is not None and moe.renormalize,
        norm_eps=spec.norm_eps,
    )


def _expected(spec: DecoderSpec) -> Iterator[tuple[Weight, int, str, tuple[int, ...]]]:
    """Kind, layer, canonical name and shape of every weight of the model."""
    hidden = spec.hidden_size
    yield Weight.EMBED, 0, "embed.weight", (spec.vocab_size, hidden)
    if not spec.tied_head:
        yield Weight.HEAD, 0, "head.weight", (spec.vocab_size, hidden)
    yield Weight.FINAL_NORM, 0, "final_norm.weight", (hidden,)
    for layer in range(spec.layers):
        for kind, name, shape in (*_attention_weights(spec), *_feed_forward_weights(spec)):
            yield kind, layer, f"layers.{layer}.{name}", shape


def _attention_weights(spec: DecoderSpec) -> Iterator[tuple[Weight, str, tuple[int, ...]]]:
    qkv = spec.q_size + 2 * spec.kv_size
    yield Weight.ATTN_NORM, "attn_norm.weight", (spec.hidden_size,)
    yield Weight.QKV, "qkv.weight", (qkv, spec.hidden_size)
    if spec.qkv_bias:
        yield Weight.QKV_BIAS, "qkv.bias", (qkv,)
    if spec.qk_norm:
        yield Weight.Q_NORM, "q_norm.weight", (spec.head_dim,)
        yield Weight.K_NORM, "k_norm.weight", (spec.head_dim,)
    yield Weight.OUTPUT, "output.weight", (spec.hidden_size, spec.q_size)
    if spec.output_bias:
        yield Weight.OUTPUT_BIAS, "output.bias", (spec.hidden_size,)


def _feed_forward_weights(spec: DecoderSpec) -> Iterator[tuple[Weight, str, tuple[int, ...]]]:
    hidden, ffn, moe = spec.hidden_size, spec.ffn_size, spec.moe
    yield Weight.MLP_NORM, "mlp_norm.weight", (hidden,)
    if moe is not None:
        yield Weight.ROUTER, "router.weight", (moe.experts, hidden)
        yield Weight.EXPERT_GATE_UP, "experts.gate_up.weight", (moe.experts, 2 * moe.ffn_size, hidden)
        yield Weight.EXPERT_DOWN, "experts.down.weight", (moe.experts, hidden, moe.ffn_size)
        return
    yield Weight.GATE_UP, "gate_up.weight", (2 * ffn, hidden)
    yield Weight.DOWN, "down.weight", (hidden, ffn)
    if spec.mlp_bias:
        yield Weight.GATE_UP_BIAS, "gate_up.bias", (2 * ffn,)
        yield Weight.DOWN_BIAS, "down.bias", (hidden,)


_MATRICES = frozenset(
    (
        Weight.EMBED,
        Weight.HEAD,
        Weight.QKV,
        Weight.OUTPUT,
        Weight.GATE_UP,
        Weight.DOWN,
        Weight.ROUTER,
        Weight.EXPERT_GATE_UP,
        Weight.EXPERT_DOWN,
    )
)


def _storage(kind: Weight, dtype: torch.dtype) -> torch.dtype:
    """Matrices are kept in the decoder's dtype, norms and biases in float32."""
    return dtype if kind in _MATRICES else torch.float32


def _take(weights: Weights, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if name not in weights:
        raise ModelError(f"model: weight {name} is missing, expected shape {list(shape)}")
    tensor = weights[name]
    if tensor.shape != shape:
        raise ModelError(f"model: weight {name} must have shape {list(shape)}, got {list(tensor.shape)}")
    return tensor.detach().to(device="cpu", dtype=dtype).contiguous()


def _check_tensors(step: PackedStep) -> None:
    """Types and sizes; what the tensors hold is checked by the kernels before they compute."""
    for name, tensor, dims in (
        ("token_ids", step.token_ids, 1),
        ("positions", step.positions, 1),
        ("seq_starts", step.seq_starts, 1),
        ("block_tables", step.block_tables, 2),
        ("logit_rows", step.logit_rows, 1),
    ):
        if tensor.dtype != torch.int32 or tensor.dim() != dims or not tensor.is_contiguous():
            got = f"{tensor.dtype} {list(tensor.shape)}, contiguous: {tensor.is_contiguous()}"
            raise InvalidRequest(f"{name}: must be contiguous int32 with {dims} dimensions, got {got}", field=name)
    sequences = step.block_tables.shape[0]
    windows = step.windows
    if windows is not None and (windows.dtype != torch.int32 or windows.shape != (sequences,)):
        raise InvalidRequest(
            f"windows: must be int32 [{sequences}], got {windows.dtype} {list(windows.shape)}", field="windows"
        )
    for name, size, wanted in (
        ("positions", step.positions.numel(), step.token_ids.numel()),
        ("seq_starts", step.seq_starts.numel(), sequences + 1),
    ):
        if size != wanted:
            raise InvalidRequest(f"{name}: must have {wanted} entries, got {size}", field=name)
    if step.token_ids.numel() == 0 and (sequences or step.logit_rows.numel()):
        raise InvalidRequest("token_ids: must not be empty when there are sequences or logit rows", field="token_ids")


def _invalid(fault: Fault) -> InvalidRequest:
    field, text = _FAULTS[FaultCode(fault.code)]
    return InvalidRequest(text.format(index=fault.index, value=fault.value, limit=fault.limit), field=field)
