"""From blocks of one layout to blocks of another: which bytes go where, when block sizes or tensor parallelism differ.

Pure. A side keeps a request's KV in ``shards`` pools, each with an equal run of the heads, in blocks of its own size:
[layers, 2 (K, V), heads of the shard, block_size, head_dim]. Token slots of one head stand side by side in both
layouts, so the smallest piece is a run of slots that share a block on either side; pieces that touch on both sides are
one run. Whole blocks of equal sides come out as one run each. Checksums are of the source's blocks, compared before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from baton.core.errors import TransferRejected
from baton.core.types import KvFormat

Blocks = Callable[[int, int], memoryview]
"""Shard and ordinal of a block to its bytes."""


@dataclass(frozen=True, slots=True)
class Side:
    """One worker's layout of a model whose heads, all together, are ``whole.kv_heads``."""

    whole: KvFormat
    shards: int

    def __post_init__(self) -> None:
        if self.shards < 1 or self.whole.kv_heads % self.shards:
            raise TransferRejected(f"shards: must divide {self.whole.kv_heads} heads, got {self.shards}")

    @property
    def shard(self) -> KvFormat:
        """The format of one shard's pool."""
        return replace(self.whole, kv_heads=self.whole.kv_heads // self.shards)

    @property
    def slot_bytes(self) -> int:
        """Of one token in one head of one layer, K or V alone."""
        return self.whole.block_bytes // (self.whole.layers * 2 * self.whole.kv_heads * self.whole.block_size)

    def offset(self, layer: int, part: int, head: int, slot: int) -> int:
        """Where slot ``slot`` of the model's head ``head`` begins in its block; ``part`` 0: K, 1: V."""
        heads = self.whole.kv_heads // self.shards
        row = (layer * 2 + part) * heads + head % heads
        return (row * self.whole.block_size + slot) * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Run:
    """``size`` bytes that are contiguous on both sides."""

    source_shard: int
    source_block: int
    source_offset: int
    target_shard: int
    target_block: int
    target_offset: int
    size: int

    def meets(self, other: Run) -> bool:
        """``other`` follows at once, in the same blocks."""
        mine = (self.source_shard, self.source_block, self.target_shard, self.target_block)
        theirs = (other.source_shard, other.source_block, other.target_shard, other.target_block)
        return (
            mine == theirs
            and self.source_offset + self.size == other.source_offset
            and self.target_offset + self.size == other.target_offset
        )


def check_convertible(source: Side, target: Side) -> None:
    """TransferRejected naming the first field in which the two sides may not differ."""
    one, other = source.whole, target.whole
    for name in ("dtype", "layers", "kv_heads", "head_dim", "layout"):
        if getattr(one, name) != getattr(other, name):
            raise TransferRejected(f"format.{name}: {getattr(one, name)!r} cannot become {getattr(other, name)!r}")


def reslice(source: Side, target: Side, first_token: int, tokens: int) -> Iterator[Run]:
    """The runs of ``tokens`` tokens from ``first_token`` on, every byte of theirs once. Block ordinals are those of the
    sequence on each side. TransferRejected when the sides do not fit."""
    check_convertible(source, target)
    for start, stop in _stretches(source, target, first_token, first_token + tokens):
        yield from _merged(_pieces(source, target, start, stop))


def apply(runs: Iterator[Run], source: Blocks, target: Blocks) -> None:
    """Copy the runs from block to block."""
    for run in runs:
        piece = source(run.source_shard, run.source_block)[run.source_offset : run.source_offset + run.size]
        target(run.target_shard, run.target_block)[run.target_offset : run.target_offset + run.size] = piece


def _stretches(source: Side, target: Side, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Tokens cut wherever a block ends on either side."""
    while start < stop:
        ends = [(start // size + 1) * size for size in (source.whole.block_size, target.whole.block_size)]
        end = min(stop, *ends)
        yield start, end
        start = end


def _pieces(source: Side, target: Side, start: int, stop: int) -> Iterator[Run]:
    """One for each head of each shard that both sides have in common, in the order of the source's bytes."""
    size = (stop - start) * source.slot_bytes
    source_block, source_slot = divmod(start, source.whole.block_size)
    target_block, target_slot = divmod(start, target.whole.block_size)
    source_heads, target_heads = (side.whole.kv_heads // side.shards for side in (source, target))
    for shard in range(source.shards):
        for layer in range(source.whole.layers):
            for part in (0, 1):
                for head in range(shard * source_heads, (shard + 1) * source_heads):
                    yield Run(
                        shard,
                        source_block,
                        source.offset(layer, part, head, source_slot),
                        head // target_heads,
                        target_block,
                        target.offset(layer, part, head, target_slot),
                        size,
                    )


def _merged(pieces: Iterator[Run]) -> Iterator[Run]:
    last: Run | None = None
    for piece in pieces:
        if last is not None and last.meets(piece):
            last = replace(last, size=last.size + piece.size)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
