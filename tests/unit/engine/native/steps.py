"""Builds packed steps for decoder tests: sequences with their own blocks, run in chunks and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from baton.engine.decoder import Decoder, PackedStep

BLOCK_SIZE = 16


@dataclass
class Stream:
    """One sequence: the blocks it owns and how many tokens are in the cache."""

    blocks: list[int]
    cached: int = 0


@dataclass
class Cache:
    """A pool that hands its blocks out from the end and scattered, so that a mistaken table shows."""

    decoder: Decoder
    blocks: int = 128
    pool: torch.Tensor = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.decoder.spec
        shape = (self.blocks, spec.layers, 2, spec.kv_heads, BLOCK_SIZE, spec.head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=self.decoder.dtype)
        self.free = [block for start in (1, 0) for block in range(start, self.blocks, 2)]

    def stream(self, tokens: int) -> Stream:
        return Stream([self.free.pop() for _ in range(-(-tokens // BLOCK_SIZE))])


def run(
    cache: Cache, work: Sequence[tuple[Stream, Sequence[int]]], logit_rows: Sequence[int] | None = None
) -> torch.Tensor:
    """One step that appends tokens to each stream; logits of each stream's last row unless ``logit_rows`` is given."""
    return cache.decoder.forward(step_of(work, logit_rows), cache.pool)


def step_of(work: Sequence[tuple[Stream, Sequence[int]]], logit_rows: Sequence[int] | None = None) -> PackedStep:
    """As ``run`` makes it; the streams have the tokens from now on."""
    starts, ids, positions = [0], [], []
    for stream, tokens in work:
        ids.extend(tokens)
        positions.extend(range(stream.cached, stream.cached + len(tokens)))
        starts.append(len(ids))
        stream.cached += len(tokens)
    width = max(len(stream.blocks) for stream, _ in work)
    tables = [stream.blocks + [0] * (width - len(stream.blocks)) for stream, _ in work]
    rows = [end - 1 for end in starts[1:]] if logit_rows is None else logit_rows
    return packed(ids, positions, starts, tables, rows)


def packed(
    ids: Sequence[int],
    positions: Sequence[int],
    starts: Sequence[int],
    tables: Sequence[Sequence[int]],
    rows: Sequence[int],
) -> PackedStep:
    ids_, positions_, starts_, rows_ = (torch.tensor(x, dtype=torch.int32) for x in (ids, positions, starts, rows))
    return PackedStep(ids_, positions_, starts_, torch.tensor(tables, dtype=torch.int32), rows_)


def chunked(cache: Cache, tokens: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Logits of every position of one fresh sequence that is fed in chunks of ``sizes``, the last one repeated."""
    stream = cache.stream(len(tokens))
    rows: list[torch.Tensor] = []
    for index in range(len(tokens)):
        size = sizes[min(index, len(sizes) - 1)]
        chunk = tokens[stream.cached : stream.cached + size]
        if not chunk:
            break
        rows.append(run(cache, [(stream, chunk)], range(len(chunk))))
    return torch.cat(rows)


def greedy(cache: Cache, prompt: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
    """``count`` greedy tokens after the prompt, and the logits of the first."""
    stream = cache.stream(len(prompt) + count)
    first = logits = run(cache, [(stream, prompt)])[0]
    out = [int(logits.argmax())]
    while len(out) < count:
        logits = run(cache, [(stream, out[-1:])])[0]
        out.append(int(logits.argmax()))
    return out, first
