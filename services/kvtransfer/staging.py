"""A little memory between a worker's front and its engine: what came over the wire gets from one to the other by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from baton.core.api import EngineApi
from baton.core.types import KvChunk, KvFormat
from baton.engine.sharedpool import PoolMemory, shared_pool_memory
from services.kvtransfer.layout import unpack


class Staging:
    """A pool of blocks that the engine pulls from as it does from another worker's. Written by this front only."""

    def __init__(self, memory: PoolMemory, blocks: int, source: int) -> None:
        self.source = source  # as the engine calls it
        self._memory = memory
        self._free = list(range(blocks))
        self._blocks = blocks
        self._returned = asyncio.Event()

    def fits(self, block_count: int) -> bool:
        return block_count <= self._blocks

    @asynccontextmanager
    async def laid_out(self, chunk: KvChunk) -> AsyncIterator[tuple[int, ...]]:
        """The chunk's payload as whole blocks, and where they stand for as long as the block lasts. Waits for room."""
        while len(self._free) < chunk.block_count:
            self._returned.clear()
            await self._returned.wait()
        taken = [self._free.pop() for _ in range(chunk.block_count)]
        try:
            self._lay_out(chunk, taken)
            yield tuple(taken)
        finally:
            self._free += taken
            self._returned.set()

    def _lay_out(self, chunk: KvChunk, taken: list[int]) -> None:
        layout, view = self._memory.layout, self._memory.view
        size, payload = layout.block_bytes, memoryview(chunk.body)
        for index, block in enumerate(taken):
            piece = payload[index * size : (index + 1) * size]
            whole = piece if len(piece) == size else unpack(piece, layout, 1)
            view[block * size : (block + 1) * size] = whole


@contextmanager
def staging(engine: EngineApi, layout: KvFormat, size: int) -> Iterator[Staging | None]:
    """About ``size`` bytes of it for as long as the block lasts; None where the engine's pool is not shared memory."""
    blocks = max(1, size // layout.block_bytes)
    memory = None if engine.pool is None else shared_pool_memory(blocks, layout)
    if memory is None:
        yield None
        return
    try:
        source = engine.attach(memory.fd)
        try:
            yield Staging(memory, blocks, source)
        finally:
            engine.detach(source)
    finally:
        memory.close()
