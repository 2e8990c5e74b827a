"""``CudaRunner`` on the CPU in float32: its own batch, decoder and bookkeeping over kernels in plain torch.

Streams, events and pinned memory are stood in for; what a double is given is checked to be what the kernels take.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from baton.core.types import KvFormat, ModelCard, Module
from baton.engine.cuda.attention_shape import ChunkTable
from baton.engine.cuda.batch import Batch
from baton.engine.cuda.decoder import Activations, CudaDecoder, DecoderLimits
from baton.engine.cuda.gemv import Norm
from baton.engine.cuda.graphs import DecodeStep
from baton.engine.cuda.kernels import Overlap
from baton.engine.cuda.runner import CudaRunner, Machinery
from baton.engine.cuda.sampler import NOT_FINITE, SOUND
from baton.engine.cuda.step_arrays import BatchShape, StepArrays, StepLayout, decode_buckets
from baton.engine.cuda.step_buffer import StepBuffer
from baton.engine.runner import Draw
from baton.engine.sampler import Row, sample
from baton.engine.spec import DecoderSpec
from baton.engine.weights.load import load_weights
from baton.engine.weights.source import load_spec
from tests.goldens import DATA

CPU = torch.device("cpu")


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's CUDA surface, as far as the runner uses it, without a GPU: everything happens at once."""

    class Event:
        def __init__(self, *, enable_timing: bool = False) -> None:
            self._is_timed = enable_timing
            self._at = 0

        def record(self) -> None:
            self._at = next(ticks)

        def synchronize(self) -> None: ...

        def elapsed_time(self, later: Event) -> float:
            assert self._is_timed
            assert later._is_timed
            assert self._at
            assert later._at
            return float(later._at - self._at)

    ticks = itertools.count(1)

    class Stream:
        def wait_stream(self, other: object) -> None: ...

    for name in ("zeros", "empty", "tensor"):
        original = getattr(torch, name)

        def unpinned(*sizes: Any, _original: Any = original, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return _original(*sizes, **options)

        monkeypatch.setattr(torch, name, unpinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(Activations, "allocate", classmethod(_wide))


def _wide(kind: type[Activations], spec: DecoderSpec, rows: int, device: torch.device) -> Activations:
    ffn = spec.ffn_size if spec.moe is None else 0
    widths = dict.fromkeys(("residual", "normed", "projected"), spec.hidden_size)
    widths |= {"qkv": spec.q_size + 2 * spec.kv_size, "mixed": spec.q_size, "gate_up": 2 * ffn, "gated": ffn}
    return kind(*(torch.zeros(rows, widths[field.name]) for field in fields(kind)))


class TorchKernels:
    """``Kernels`` in plain torch."""

    def embed(
        self, tokens: torch.Tensor, sources: torch.Tensor, drawn: torch.Tensor, table: torch.Tensor, out: torch.Tensor
    ) -> None:
        out.copy_(table[torch.where(sources >= 0, drawn[sources.clamp_min(0).long()], tokens).long()])

    def add_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        if x is not None:
            residual += x
        out.copy_(_normed(residual, weight, eps))

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
        q, k, v = qkv.unflatten(1, (-1, spec.head_dim)).split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = _normed(q, q_norm, spec.norm_eps), _normed(k, k_norm, spec.norm_eps)
        angles = cos[positions.long()][:, None], sin[positions.long()][:, None]
        qkv[:, : spec.q_size] = _rotated(q, *angles).flatten(1)
        k = _rotated(k, *angles)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, pool.shape[4])
                pool[block, layer, 0, :, offset] = k[row]
                pool[block, layer, 1, :, offset] = v[row]

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x[rows.long()])


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class TorchGemm:
    """``Gemm`` in plain torch, with the fused products for up to ``few`` rows."""

    def __init__(self, few: int) -> None:
        self._few = few

    def supports(self, rows: int) -> bool:
        return rows <= self._few

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        assert len(x) == len(out) > 0
        assert x.is_contiguous()
        assert out.is_contiguous()
        out.copy_(torch.nn.functional.linear(x, weight, bias))

    def norm_linear(
        self,
        residual: torch.Tensor,
        norm: Norm,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
    ) -> None:
        self.linear(_normed(residual, norm.gain, norm.eps), weight, out, bias)

    def norm_gate_up_silu(
        self,
        residual: torch.Tensor,
        norm: Norm,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
    ) -> None:
        gate_up = residual.new_empty(len(residual), len(weight))
        self.norm_linear(residual, norm, weight, gate_up, bias)
        TorchKernels().silu_mul(gate_up, out)

    def linear_add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor,
        bias: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
    ) -> None:
        residual += torch.nn.functional.linear(x, weight, bias)


def _paged(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    blocks: torch.Tensor,
    length: int,
    spec: DecoderSpec,
    *,
    hidden: int = 0,
    window: int | None = None,
) -> torch.Tensor:
    """[n, q_size]: causal attention of q [n, q_size], the last n of ``length`` positions, whose KV is in ``blocks``.

    Nobody sees the first ``hidden`` positions.
    """
    heads = q.unflatten(1, (spec.heads, spec.head_dim))
    keys, values = (pool[blocks.long(), layer, part].transpose(1, 2).flatten(0, 1)[:length] for part in (0, 1))
    group = spec.heads // spec.kv_heads
    scores = torch.einsum("nhd,mhd->hnm", heads, keys.repeat_interleave(group, 1)) * spec.head_dim**-0.5
    distance = torch.arange(length - len(q), length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (torch.arange(length) >= hidden)
    if window is not None:
        visible &= distance < window
    shares = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hnm,mhd->nhd", shares, values.repeat_interleave(group, 1)).flatten(1)


class TorchDecodeAttention:
    """``DecodeAttention`` in plain torch, which must have been planned for what it finds on the device."""

    def __init__(self, spec: DecoderSpec, rows: int, pool: torch.Tensor, arrays: StepArrays[torch.Tensor]) -> None:
        self.rows = rows
        self._spec = spec
        self._pool = pool
        self._arrays = arrays
        self._planned = np.zeros(0, np.int32)

    def plan(self, indptr: np.ndarray) -> None:
        assert len(indptr) == self.rows + 1
        self._planned = indptr.copy()

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        pages = self._arrays.row_pages[: self.rows + 1].tolist()
        assert pages == self._planned.tolist()
        for row in range(self.rows):
            blocks = self._arrays.block_ids[pages[row] : pages[row + 1]]
            if not len(blocks):
                out[row] = torch.nan  # nobody is to use it
                continue
            length = (len(blocks) - 1) * self._pool.shape[4] + int(self._arrays.row_last_page[row])
            hidden = int(self._arrays.row_hidden[row])
            assert 0 <= hidden < min(length, self._pool.shape[4]), "a block that is not seen is in the table"
            out[row] = _paged(q[row : row + 1], self._pool, layer, blocks, length, self._spec, hidden=hidden)[0]


class TorchPrefillAttention:
    """``PrefillAttention`` in plain torch."""

    def __init__(self, spec: DecoderSpec, pool: torch.Tensor) -> None:
        self._spec = spec
        self._pool = pool
        self._tables: list[tuple[ChunkTable[Any], ChunkTable[Any]]] = []

    def plan(self, host: Sequence[ChunkTable[Any]], device: Sequence[ChunkTable[Any]]) -> None:
        self._tables = list(zip(host, device, strict=True))

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        assert out.is_contiguous()
        row, windows = 0, [host.window for host, _ in self._tables]
        assert len(windows) == len(set(windows)) > 0
        for host, device in self._tables:
            assert device.starts.tolist() == host.starts.tolist()
            assert device.pages.indptr.tolist() == host.pages.indptr.tolist()
            for chunk in range(host.chunks):
                size = int(host.starts[chunk + 1] - host.starts[chunk])
                rows = slice(row, row + size)
                out[rows] = self._attend(layer, q[rows], device, chunk)
                row += size
        assert len(q) == len(out) == row

    def _attend(self, layer: int, q: torch.Tensor, device: ChunkTable[Any], chunk: int) -> torch.Tensor:
        table = device.pages
        first, last = table.indptr[chunk : chunk + 2].tolist()
        length = (last - first - 1) * self._pool.shape[4] + int(table.last_page[chunk])
        return _paged(q, self._pool, layer, table.indices[first:last], length, self._spec, window=device.window)


class TorchSampler:
    """``DeviceSampler`` by the CPU's. It counts what it draws itself, as the device does, and sees no later context."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, Draw | None]] = {}
        self._contexts: dict[int, list[int]] = {}
        self._new: dict[int, Sequence[int]] = {}

    def set_row(self, row: int, key: int, draw: Draw | None, context: Sequence[int]) -> None:
        self._rows[row] = (key, draw)
        if draw is not None and key not in self._contexts:
            self._new[key] = context

    def forget(self, key: int) -> None:
        self._contexts.pop(key, None)

    def upload(self) -> None:
        self._contexts |= {key: list(context) for key, context in self._new.items()}
        self._new.clear()

    def sample(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        rows: int,
        out_tokens: torch.Tensor,
        out_flags: torch.Tensor,
        overlap: Overlap = Overlap.NO,
    ) -> None:
        for row in (row for row in range(rows) if positions[row] >= 0):
            key, draw = self._rows[row]
            if draw is None:
                continue
            context = self._contexts[key] if draw.sampling.has_penalties else [0] * (int(positions[row]) + 1)
            assert len(context) == int(positions[row]) + 1
            drawn = sample(logits[row : row + 1], [Row(draw, context)])[0]
            out_tokens[row] = drawn.token_id or 0
            out_flags[row] = SOUND if drawn.error is None else NOT_FINITE
            context.append(int(out_tokens[row]))


def cpu_runner(name: str, *, rows: int, tokens: int, blocks: int, block_size: int = 16, few: int = 4) -> CudaRunner:
    """A ``CudaRunner`` over the tiny model ``name``. Its pool starts as NaN, but for the block that padding reads."""
    path = DATA / "tiny" / name
    spec = load_spec(path)
    weights = load_weights(path, spec, torch.float32)
    per_sequence = -(-spec.context_length // block_size)
    shape = BatchShape(rows, tokens, block_size, per_sequence, blocks, decode_buckets(rows), 0, spec.sliding_window)
    layout = StepLayout(shape)
    buffer, results = StepBuffer(layout, CPU, ctypes.memmove), torch.zeros(2, rows, dtype=torch.int32)
    pool = torch.full((blocks + 1, spec.layers, 2, spec.kv_heads, block_size, spec.head_dim), torch.nan)
    pool[blocks] = 0.0
    kernels, gemm, limits = TorchKernels(), TorchGemm(few), DecoderLimits(tokens, rows)
    decoder = CudaDecoder(spec, weights, kernels, gemm, limits, results[0])  # type: ignore[arg-type]
    decoder._logits = decoder._logits.float()
    prefill, sampler = TorchPrefillAttention(spec, pool), TorchSampler()

    def draw(logits: torch.Tensor, positions: torch.Tensor) -> None:
        sampler.sample(logits, positions, len(positions), results[0], results[1])

    steps: dict[int, DecodeStep] = {}
    for bucket in shape.buckets:
        attention = TorchDecodeAttention(spec, bucket, pool, buffer.arrays)
        steps[bucket] = DecodeStep(decoder, pool, buffer.arrays, attention, draw)  # type: ignore[arg-type]
    machinery = Machinery(decoder, steps, prefill, sampler, layout, buffer, Batch(shape), pool, results, ctypes.memmove)  # type: ignore[arg-type]
    kv_format = KvFormat("float32", block_size, spec.layers, spec.kv_heads, spec.head_dim)
    sizes = (spec.context_length, spec.vocab_size)
    card = ModelCard(name, spec.architecture, *sizes, "", kv_format, spec.eos_token_ids, (Module.ATTENTION_WINDOW,))
    return CudaRunner(machinery, card, ExitStack())
