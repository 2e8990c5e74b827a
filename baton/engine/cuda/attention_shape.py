"""What an attention backend needs to know of the model and the pool, and the tables it reads. No kernels here."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from baton.core.errors import ConfigError
from baton.engine.spec import DecoderSpec

Array = TypeVar("Array", bound=Sized)

HEAD_DIMS = (64, 128, 256)
UNLIMITED = -1  # FlashInfer's code for "no window"


@dataclass(frozen=True, slots=True)
class KvScale:
    """What one layer's stored FP8 keys and values are multiplied with to get the real ones."""

    k: float = 1.0
    v: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of one model over one pool. ``window`` is the model's own: the visible tokens, the query's included."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    scale: float  # of the scores before the softmax
    window: int | None = None
    kv_dtype: torch.dtype = torch.bfloat16
    kv_scales: tuple[KvScale, ...] = ()  # by layer; only read for an FP8 pool, and then all 1 when empty

    def __post_init__(self) -> None:
        """Raises ConfigError for what no kernel here computes."""
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(f"head_dim: attention on the GPU needs one of {HEAD_DIMS}, got {self.head_dim}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads: must be a multiple of kv_heads {self.kv_heads}, got {self.heads}")
        if self.kv_dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            raise ConfigError(f"kv_dtype: attention on the GPU needs bfloat16 or float8_e4m3fn, got {self.kv_dtype}")
        if self.kv_scales and len(self.kv_scales) != self.layers:
            raise ConfigError(f"kv_scales: must name all {self.layers} layers, got {len(self.kv_scales)}")

    @classmethod
    def of(cls, spec: DecoderSpec, block_size: int, kv_dtype: torch.dtype = torch.bfloat16) -> AttentionShape:
        """The shape of ``spec`` over a pool of ``kv_dtype``, with the usual scale 1 / sqrt(head_dim)."""
        return cls(
            layers=spec.layers,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            scale=spec.head_dim**-0.5,
            window=spec.sliding_window,
            kv_dtype=kv_dtype,
        )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def window_left(self) -> int:
        """FlashInfer's form of ``window``."""
        return window_left(self.window)

    @property
    def windowed(self) -> AttentionShape:
        """The shape of kernels that take a window with each launch; FlashInfer compiles those apart."""
        return self if self.window is not None else replace(self, window=1)

    def kv_scale(self, layer: int) -> KvScale:
        return self.kv_scales[layer] if self.kv_scales else KvScale()

    def layer_views(self, pool: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer, [blocks, kv_heads, block_size, head_dim], strided views of the pool.

        Raises ValueError when the pool is not [blocks, layers, 2, kv_heads, block_size, head_dim] of ``kv_dtype``.
        """
        expected = (self.layers, 2, self.kv_heads, self.block_size, self.head_dim)
        if tuple(pool.shape[1:]) != expected or pool.dtype != self.kv_dtype:
            raise ValueError(f"pool: must be [blocks, {expected}] {self.kv_dtype}, got {pool.shape} {pool.dtype}")
        return [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(self.layers)]


@dataclass(frozen=True, slots=True)
class PageTable(Generic[Array]):
    """Which blocks hold the KV of each row, int32. Row i has blocks indices[indptr[i]:indptr[i + 1]], at least one."""

    indptr: Array  # [rows + 1]
    indices: Array  # [indptr[rows]] or longer
    last_page: Array  # [rows] tokens in the last block, from 1 to block_size
    hidden: Array | None = None  # [rows] tokens at the start of the first block that a row does not see; None: sees all


@dataclass(frozen=True, slots=True)
class ChunkTable(Generic[Array]):
    """Chunks of a prefill step that see equally far, int32: chunk i has query rows starts[i]:starts[i + 1] of them, at
    the end of its KV. Blocks that the window hides from all of a chunk's rows may be left out."""

    starts: Array  # [chunks + 1]
    pages: PageTable[Array]
    window: int | None = None  # tokens that a row sees at most, itself included; None: as the model

    @property
    def chunks(self) -> int:
        return len(self.starts) - 1


def first_rows(table: PageTable[Any], rows: int) -> PageTable[Any]:
    """The table of the first ``rows`` rows, as views."""
    hidden = None if table.hidden is None else table.hidden[:rows]
    return PageTable(table.indptr[: rows + 1], table.indices, table.last_page[:rows], hidden)


def window_left(window: int | None) -> int:
    """The oldest visible token is this many before the query's own; UNLIMITED without a window."""
    return UNLIMITED if window is None else window - 1
