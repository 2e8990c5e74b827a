"""A random paged KV pool with page tables, and attention over it in plain float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.cuda.attention_shape import AttentionShape, ChunkTable, PageTable

Ints = NDArray[np.int32]
DEVICE = torch.device("cuda")


def attention_shape(
    heads: int, kv_heads: int, head_dim: int, *, window: int | None = None, block_size: int = 16, layers: int = 2
) -> AttentionShape:
    scale = head_dim**-0.5
    return AttentionShape(layers, heads, kv_heads, head_dim, block_size, scale, window)


def fp8(shape: AttentionShape) -> AttentionShape:
    return replace(shape, kv_dtype=torch.float8_e4m3fn)


class PagedKv:
    """A pool in which every sequence of ``lengths`` has blocks of its own, scattered; what is no token is NaN."""

    def __init__(self, shape: AttentionShape, lengths: Sequence[int], seed: int, room: int = 0) -> None:
        self.shape = shape
        self._random = np.random.default_rng(seed)
        size = shape.block_size
        counts = [-(-(length + room) // size) for length in lengths]
        shuffled = self._random.permutation(sum(counts) + 3).astype(np.int32)
        ends = np.cumsum(counts)
        self.blocks = [shuffled[end - count : end] for end, count in zip(ends, counts, strict=True)]
        generator = torch.Generator(DEVICE).manual_seed(seed)
        dimensions = (len(shuffled), shape.layers, 2, shape.kv_heads, size, shape.head_dim)
        drawn = torch.randn(dimensions, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        self.pool = drawn.to(shape.kv_dtype)
        if not room:
            self._poison_tails(lengths)

    def _poison_tails(self, lengths: Sequence[int]) -> None:
        for length, blocks in zip(lengths, self.blocks, strict=True):
            used = (length - 1) % self.shape.block_size + 1
            self.pool[int(blocks[-1])][..., used:, :] = float("nan")

    def table(self, lengths: Sequence[int], windows: Sequence[int | None] | None = None) -> PageTable[Ints]:
        """The host's page table when the sequences have ``lengths`` tokens, of which the last sees ``windows``."""
        seen = [self.shape.window] * len(lengths) if windows is None else windows
        oldest = [max(0, length - (window or length)) for length, window in zip(lengths, seen, strict=True)]
        return self.table_from(oldest, lengths)

    def table_from(self, oldest: Sequence[int], lengths: Sequence[int]) -> PageTable[Ints]:
        """The same by the first token that is seen, of each sequence."""
        size = self.shape.block_size
        spans = [(first // size, -(-length // size)) for first, length in zip(oldest, lengths, strict=True)]
        indptr = np.concatenate(([0], np.cumsum([last - first for first, last in spans]))).astype(np.int32)
        indices = np.concatenate([blocks[slice(*span)] for blocks, span in zip(self.blocks, spans, strict=True)])
        last_page = np.array([(length - 1) % size + 1 for length in lengths], np.int32)
        hidden = np.array([first % size for first in oldest], np.int32)
        return PageTable(indptr, indices.astype(np.int32), last_page, hidden)

    def queries(self, rows: int, seed: int) -> torch.Tensor:
        """bf16 [rows, heads * head_dim], a slice of a wider fused row, as the engine's q is."""
        shape = self.shape
        generator = torch.Generator(DEVICE).manual_seed(seed)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        fused = torch.randn(rows, width, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        return fused[:, : shape.heads * shape.head_dim]

    def reference(
        self, layer: int, sequence: int, q: torch.Tensor, length: int, window: int | None = None
    ) -> torch.Tensor:
        """float32 [rows, heads * head_dim]: the last ``rows`` tokens of ``length`` attend causally."""
        shape = self.shape
        blocks = torch.from_numpy(self.blocks[sequence][: -(-length // shape.block_size)].astype(np.int64)).to(DEVICE)
        k, v = (self.pool[blocks, layer, part].float().transpose(0, 1).flatten(1, 2)[:, :length] for part in range(2))
        rows = q.shape[0]
        grouped = q.float().view(rows, shape.kv_heads, shape.group, shape.head_dim).permute(1, 2, 0, 3)
        scores = grouped @ k[:, None].transpose(-1, -2) * shape.scale
        distance = torch.arange(length - rows, length, device=DEVICE)[:, None] - torch.arange(length, device=DEVICE)
        seen = shape.window if window is None else window
        hidden = distance < 0 if seen is None else (distance < 0) | (distance >= seen)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return (weights @ v[:, None]).permute(2, 0, 1, 3).reshape(rows, -1)


def on_device(table: PageTable[Ints]) -> PageTable[torch.Tensor]:
    assert table.hidden is not None
    arrays = (table.indptr, table.indices, table.last_page, table.hidden)
    return PageTable(*(torch.from_numpy(array).to(DEVICE) for array in arrays))


def chunks_on_device(table: ChunkTable[Ints]) -> ChunkTable[torch.Tensor]:
    return ChunkTable(torch.from_numpy(table.starts).to(DEVICE), on_device(table.pages), table.window)


def copy_into(target: PageTable[torch.Tensor], source: PageTable[Ints]) -> None:
    """Overwrite the table that a graph has captured."""
    target.indptr[: len(source.indptr)].copy_(torch.from_numpy(source.indptr))
    target.indices[: len(source.indices)].copy_(torch.from_numpy(source.indices))
    target.last_page[: len(source.last_page)].copy_(torch.from_numpy(source.last_page))
    assert target.hidden is not None
    assert source.hidden is not None
    target.hidden[: len(source.hidden)].copy_(torch.from_numpy(source.hidden))


def relative_errors(out: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """||out - reference|| / ||reference|| of each row."""
    return (out.float() - reference).norm(dim=-1) / reference.norm(dim=-1)
