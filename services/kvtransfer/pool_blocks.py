"""Blocks as they stand in this worker's own pool, which its front has mapped: their bytes and their checksums."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

from baton.core.api import PrefillRun, SharedPool
from baton.core.errors import TransportUnavailable
from baton.core.types import FilledBlocks, KvFormat
from baton.engine.blockcopy import BlockCopy
from baton.engine.sharedpool import packed_block, packed_digest

TURN_BYTES = 16 << 20  # about a millisecond; each turn begins with caches that the one before has swept


async def in_turns(block_count: int, layout: KvFormat, work: Callable[[range], Sequence[bytes]]) -> tuple[bytes, ...]:
    """What ``work`` finds of all blocks, done by the loop's own thread: of as many at a time as a front may spend on
    before it looks at its other work. To wake another thread takes as long as to digest megabytes."""
    found: list[bytes] = []
    most = max(1, TURN_BYTES // layout.block_bytes)
    for first in range(0, block_count, most):
        if first:
            await asyncio.sleep(0)
        found += work(range(first, min(first + most, block_count)))
    return tuple(found)


class PoolBlocks:
    """``checksums`` has a thread of its own, which computes those of one offer after those of another: the first offers
    are on their way while the next ones are digested, and the front's loop goes on."""

    def __init__(self, view: memoryview, layout: KvFormat, block_copy: BlockCopy) -> None:
        self._view = view
        self._layout = layout
        self._block_copy = block_copy
        self._thread = ThreadPoolExecutor(1, "kv-checksums")
        self._is_closed = False

    def pieces(self, run: PrefillRun, blocks: FilledBlocks) -> tuple[bytes | memoryview, ...]:
        """Each block as it travels: views of the pool, but for one that is partly filled."""
        numbers = run.block_ids(blocks.first_block, blocks.block_count)
        filled = blocks.filled_slots(self._layout.block_size)
        return (*map(self._block, numbers[:-1]), packed_block(self._block(numbers[-1]), self._layout, filled))

    async def checksums(self, run: PrefillRun, blocks: FilledBlocks) -> tuple[bytes, ...]:
        """TransportUnavailable once this worker is ending."""
        if self._is_closed:
            raise TransportUnavailable("this worker is ending")
        numbers = run.block_ids(blocks.first_block, blocks.block_count)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._digests, numbers, blocks)

    async def checksums_in_turns(self, run: PrefillRun, blocks: FilledBlocks) -> tuple[bytes, ...]:
        """The same, by the loop's own thread."""

        def digests(turn: range) -> tuple[bytes, ...]:
            part = blocks.part(blocks.first_block + turn.start, len(turn), self._layout.block_size)
            return self._digests(run.block_ids(part.first_block, part.block_count), part)

        return await in_turns(blocks.block_count, self._layout, digests)

    def close(self) -> None:
        """What is being digested is finished first."""
        self._is_closed = True
        self._thread.shutdown()

    def _digests(self, numbers: tuple[int, ...], blocks: FilledBlocks) -> tuple[bytes, ...]:
        layout, first = self._layout, blocks.first_block
        filled = blocks.filled_slots(layout.block_size)
        if filled == layout.block_size:
            return self._block_copy.digests(self._view, numbers, layout.block_bytes, first)
        whole = self._block_copy.digests(self._view, numbers[:-1], layout.block_bytes, first)
        return (*whole, packed_digest(self._block(numbers[-1]), first + len(whole), layout, filled))

    def _block(self, number: int) -> memoryview:
        size = self._layout.block_bytes
        return self._view[number * size : (number + 1) * size]


@contextmanager
def pool_blocks(pool: SharedPool | None, layout: KvFormat, block_copy: BlockCopy) -> Iterator[PoolBlocks | None]:
    """For as long as the block lasts; None where there is no such pool."""
    if pool is None:
        yield None
        return
    with closing(PoolBlocks(pool.view, layout, block_copy)) as blocks:
        yield blocks
