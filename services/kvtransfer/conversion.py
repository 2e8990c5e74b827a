"""Blocks of one layout made from blocks of another, where block sizes or tensor parallelism differ. Pure.

A block is [shards, layers, 2 (K, V), kv_heads / shards, block_size, head_dim]. A row is what it holds of one head in
one layer, K or V: token slots side by side. Sizes cut the rows differently and shards put them in another order, so the
smallest piece is a run of slots of one row that share a block on either side.

Receivers take whole blocks of their own from one offer, so offers begin and end where blocks of both sides do, but for
the prompt's last block. Checksums are of the sender's blocks and compared before.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from baton.core.errors import TransferRejected
from baton.core.streams import closing
from baton.core.types import FilledBlocks, KvChunk, KvFormat
from services.kvtransfer.checksum import block_checksums

CONVERTED = ("block_size", "shards")  # fields of a format that may differ
KEPT = ("dtype", "layers", "kv_heads", "head_dim", "layout")  # and those that may not

Piece = tuple[int, int, int, int]  # of a row: where the block begins, bytes of its rows, first byte in a row, bytes


@dataclass(frozen=True, slots=True)
class Landing:
    """Where an offer's tokens ``begin`` to ``end - 1`` go, in the receiver's blocks. Those of blocks that the receiver
    holds already have come for nothing."""

    first_block: int
    block_count: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """From a sender's layout to a receiver's, which may be the same."""

    source: KvFormat
    target: KvFormat

    @property
    def is_needed(self) -> bool:
        return self.source != self.target

    @property
    def group(self) -> int:
        """The fewest blocks of the sender that fill whole blocks of the receiver."""
        return self._common // self.source.block_size

    @property
    def _common(self) -> int:
        """Tokens from one place where both sides begin a block to the next."""
        return lcm(self.source.block_size, self.target.block_size)

    def first_block(self, held: int) -> int:
        """The first block to send to a receiver that holds ``held`` of its own."""
        return held * self.target.block_size // self._common * self.group

    def target_blocks(self, tokens: int) -> int:
        """How many blocks of the receiver hold so many tokens."""
        return -(-tokens // self.target.block_size)

    def at_most(self, count: int) -> int:
        """About ``count`` blocks of the sender, but as many as fill whole ones of the receiver."""
        return max(1, count // self.group) * self.group

    def grouped(self, filled: AsyncIterator[FilledBlocks]) -> AsyncIterator[FilledBlocks]:
        """The same blocks of the sender, cut where a group ends; what is left of the last group comes at the end.

        To be closed in the place of ``filled``.
        """
        return self._cut(filled) if self.is_needed else filled

    async def _cut(self, filled: AsyncIterator[FilledBlocks]) -> AsyncGenerator[FilledBlocks, None]:
        left: FilledBlocks | None = None
        async with closing(filled):
            async for blocks in filled:
                first, count = blocks.first_block, blocks.block_count
                if left is not None:
                    first, count = left.first_block, left.block_count + count
                whole = (first + count) // self.group * self.group - first
                reached = FilledBlocks(first, count, blocks.tokens)
                if whole > 0:
                    yield reached.part(first, whole, self.source.block_size)
                left = reached.part(first + whole, count - whole, self.source.block_size) if count > whole else None
            if left is not None:
                yield left

    def landing(self, first_block: int, block_count: int, context_tokens: int, held: int) -> Landing:
        """Of blocks of the sender, of a prompt of ``context_tokens`` of which the receiver holds ``held`` blocks.

        TransferRejected when one of them holds nothing of the prompt, and when they begin or end inside a block of the
        receiver, which would stay unfinished.
        """
        size, own = self.source.block_size, self.target.block_size
        blocks = -(-context_tokens // size)
        if first_block + block_count > blocks:
            raise TransferRejected(
                f"block_count: {context_tokens} tokens are {blocks} blocks of {size}, "
                f"offered are {first_block}..{first_block + block_count - 1}"
            )
        begin, end = first_block * size, min(context_tokens, (first_block + block_count) * size)
        if begin % own or (end % own and end != context_tokens):
            raise TransferRejected(
                f"first_block: blocks {first_block}..{first_block + block_count - 1} of {size} tokens fill no whole "
                f"blocks of {own}"
            )
        first = max(begin // own, held)
        return Landing(first, self.target_blocks(end) - first, begin, end)

    def convert(self, payload: bytes, landing: Landing) -> bytes:
        """The receiver's blocks out of the sender's, both as they travel: of the last one the filled slots only."""
        own, slot = self.target.block_size, self.source.slot_bytes
        rows = _rows(self.source, self.target)
        view, parts = memoryview(payload), list[memoryview]()
        start = landing.first_block * own
        while start < landing.end:
            stop = min(landing.end, start + own)
            pieces = list(self._pieces(landing, start, stop, slot))
            for row in rows:
                for block, width, offset, size in pieces:
                    at = block + row * width + offset
                    parts.append(view[at : at + size])
            start = stop
        return b"".join(parts)

    def _pieces(self, landing: Landing, start: int, stop: int, slot: int) -> Iterator[Piece]:
        """What makes up a row of the receiver's block with tokens ``start`` to ``stop - 1``."""
        size = self.source.block_size
        while start < stop:
            block_begin = start // size * size
            block_end = min(block_begin + size, landing.end)
            end = min(stop, block_end)
            place = (block_begin - landing.begin) * self.source.token_bytes
            yield place, (block_end - block_begin) * slot, (start - block_begin) * slot, (end - start) * slot
            start = end


def require_convertible(source: KvFormat, target: KvFormat) -> None:
    """TransferRejected naming the first field in which the two may not differ."""
    for name in KEPT:
        if getattr(source, name) != getattr(target, name):
            raise TransferRejected(f"format.{name}: {getattr(source, name)!r} cannot become {getattr(target, name)!r}")
    for form in (source, target):
        if form.block_size < 1:
            raise TransferRejected(f"format.block_size: must be at least 1, got {form.block_size}")
        if form.shards < 1 or form.kv_heads % form.shards:
            raise TransferRejected(f"format.shards: must divide {form.kv_heads} heads, got {form.shards}")


def converted(chunk: KvChunk, landing: Landing, payload: bytes, block_bytes: int) -> KvChunk:
    """What a sender of the receiver's own layout would have offered as bytes, with checksums if ``chunk`` has them."""
    first, count = landing.first_block, landing.block_count
    checksums = block_checksums(payload, first, count, block_bytes) if chunk.checksums else ()
    return KvChunk(chunk.ticket, first, count, payload, checksums)


@lru_cache(maxsize=64)
def _rows(source: KvFormat, target: KvFormat) -> tuple[int, ...]:
    """For each row of a block of ``target``, in order, which one of ``source`` it is."""
    places = {row: place for place, row in enumerate(_order(source))}
    return tuple(places[row] for row in _order(target))


def _order(form: KvFormat) -> Iterator[tuple[int, int, int]]:
    """Layer, part (0: K, 1: V) and head of each row."""
    heads = form.kv_heads // form.shards
    for shard in range(form.shards):
        for layer in range(form.layers):
            for part in (0, 1):
                for head in range(shard * heads, (shard + 1) * heads):
                    yield layer, part, head
