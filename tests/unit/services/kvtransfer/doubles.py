"""Both ends of a hand-over without engines: a prefill whose bytes are computed, a reservation that keeps what comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from baton.core.types import FilledBlocks, FirstToken, KvFormat, TokenChunk, Usage
from baton.engine.ownpool import OwnPool


class Run:
    """A prefill whose blocks fill in the given pieces; ``block`` says the bytes of each, by its ordinal. Between two
    pieces the loop turns ``turns`` times."""

    cached_tokens = 0

    def __init__(self, block: Callable[[int], bytes], pieces: Sequence[FilledBlocks], turns: int = 0) -> None:
        self._block = block
        self._pieces = pieces
        self._turns = turns

    async def filled(self) -> AsyncIterator[FilledBlocks]:
        for piece in self._pieces:
            yield piece
            for _ in range(self._turns):
                await asyncio.sleep(0)

    async def read_blocks(self, first_block: int, block_count: int) -> bytes:
        return b"".join(map(self._block, range(first_block, first_block + block_count)))

    def block_ids(self, first_block: int, block_count: int) -> tuple[int, ...]:
        raise NotImplementedError

    async def digest_blocks(self, first_block: int, filled: int, strong: bytes) -> tuple[bytes, ...]:
        raise NotImplementedError

    async def send_blocks(
        self, first_block: int, link: int, number: int, filled: int, strong: bytes
    ) -> tuple[bytes, ...]:
        raise NotImplementedError

    async def first_token(self) -> FirstToken:
        return FirstToken(1, Usage())


@dataclass
class Held:
    """A reservation, of blocks of this layout. ``spoil`` changes what is stored."""

    layout: KvFormat
    cached_tokens: int = 0
    stored: dict[int, bytes] = field(default_factory=dict[int, bytes])
    spoil: bool = False

    async def write_blocks(self, first_block: int, payload: bytes | memoryview) -> None:
        size = self.layout.block_bytes
        for index in range(len(payload) // size):
            assert first_block + index not in self.stored, "a block is written once"
            self.stored[first_block + index] = bytes(payload[index * size : (index + 1) * size])
        if self.spoil:
            self.stored[first_block] = bytes(size)

    async def read_blocks(self, first_block: int, block_count: int) -> bytes:
        return b"".join(self.stored[ordinal] for ordinal in range(first_block, first_block + block_count))

    def fill_blocks(self, first_block: int, payload: bytes | memoryview, filled: int) -> tuple[bytes, ...]:
        raise NotImplementedError

    def copy_blocks(
        self, first_block: int, source: memoryview, source_blocks: Sequence[int], filled: int
    ) -> tuple[bytes, ...]:
        raise NotImplementedError

    async def pull_blocks(
        self, first_block: int, source: int, source_blocks: Sequence[int], filled: int, strong: bytes
    ) -> tuple[bytes, ...]:
        raise NotImplementedError

    async def receive_blocks(
        self, first_block: int, link: int, number: int, filled: int, strong: bytes
    ) -> tuple[bytes, ...]:
        raise NotImplementedError

    async def decode(self, first: FirstToken | None) -> AsyncIterator[TokenChunk]:
        raise NotImplementedError
        yield TokenChunk()


class Filled(Held):
    """A reservation whose blocks stand in a pool, as these ``numbers``. ``fills``: (first block, bytes), in order."""

    def __init__(self, pool: OwnPool, layout: KvFormat, numbers: Sequence[int]) -> None:
        super().__init__(layout)
        self._pool = pool
        self._numbers = numbers
        self.fills: list[tuple[int, int]] = []

    def fill_blocks(self, first_block: int, payload: bytes | memoryview, filled: int) -> tuple[bytes, ...]:
        self.fills.append((first_block, len(payload)))
        count = -(-len(payload) // self.layout.block_bytes)
        found = self._pool.fill(self._numbers[first_block : first_block + count], payload, first_block, filled)
        if self.spoil:
            return (bytes(16), *found[1:])
        return found
