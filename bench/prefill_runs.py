"""Prefills whose hand-over is timed: computed before, or while a clock looks on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.core.api import PrefillRun
from baton.core.clock import Clock
from baton.core.streams import closing
from baton.core.types import FilledBlocks, FirstToken
from baton.engine.client import EngineClient
from bench.transfer_peer import request_of


class RunAround:
    """Another prefill's, but for ``filled``, which a subclass has."""

    def __init__(self, run: PrefillRun) -> None:
        self._run = run

    @property
    def cached_tokens(self) -> int:
        return self._run.cached_tokens

    async def read_blocks(self, first_block: int, block_count: int) -> bytes:
        return await self._run.read_blocks(first_block, block_count)

    def block_ids(self, first_block: int, block_count: int) -> tuple[int, ...]:
        return self._run.block_ids(first_block, block_count)

    async def digest_blocks(self, first_block: int, filled: int, strong: bytes) -> tuple[bytes, ...]:
        return await self._run.digest_blocks(first_block, filled, strong)

    async def send_blocks(
        self, first_block: int, link: int, number: int, filled: int, strong: bytes
    ) -> tuple[bytes, ...]:
        return await self._run.send_blocks(first_block, link, number, filled, strong)

    async def first_token(self) -> FirstToken:
        return await self._run.first_token()


class ComputedRun(RunAround):
    """A prefill that has been computed: all of its blocks are filled from the beginning."""

    def __init__(self, run: PrefillRun, blocks: FilledBlocks) -> None:
        super().__init__(run)
        self._blocks = blocks

    async def filled(self) -> AsyncIterator[FilledBlocks]:
        yield self._blocks


class ClockedRun(RunAround):
    """A prefill that is being computed, and when it was last told of blocks: ``filled_at``, first of all now."""

    def __init__(self, run: PrefillRun, clock: Clock) -> None:
        super().__init__(run)
        self._clock = clock
        self.filled_at = clock.now()

    async def filled(self) -> AsyncIterator[FilledBlocks]:
        async with closing(self._run.filled()) as filled:
            async for blocks in filled:
                self.filled_at = self._clock.now()
                yield blocks


@asynccontextmanager
async def computed(engine: EngineClient, tokens: int) -> AsyncIterator[ComputedRun]:
    async with engine.prefill(request_of(tokens)) as run, closing(run.filled()) as filled:
        count = 0
        async for blocks in filled:
            count = blocks.first_block + blocks.block_count
        await run.first_token()
        yield ComputedRun(run, FilledBlocks(0, count, tokens))
