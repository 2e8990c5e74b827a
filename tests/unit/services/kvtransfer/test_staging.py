from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from baton.core.types import KvChunk, KvFormat, Ticket, TokenRequest
from baton.engine.sharedpool import PoolMemory
from services.kvtransfer.layout import pack
from services.kvtransfer.staging import Staging

LAYOUT = KvFormat("fake", 4, 1, 1, 8)
SIZE = LAYOUT.block_bytes
TICKET = Ticket("r", TokenRequest("r", ()).attempt, "d:1", 2)


def chunk_of(blocks: int, filled: int = 4) -> KvChunk:
    return KvChunk(TICKET, 0, blocks, pack(bytes(range(1, SIZE + 1)) * blocks, LAYOUT, filled))


def run(scenario: Callable[[Staging, PoolMemory], Coroutine[Any, Any, None]], blocks: int = 3) -> None:
    async def main() -> None:
        memory = PoolMemory(blocks, LAYOUT)
        async with asyncio.timeout(30):
            await scenario(Staging(memory, blocks, 7), memory)
        memory.close()

    asyncio.run(main())


def test_a_payload_lies_there_as_whole_blocks() -> None:
    async def scenario(staging: Staging, memory: PoolMemory) -> None:
        async with staging.laid_out(chunk_of(2, filled=3)) as blocks:
            whole, partial = (bytes(memory.view[block * SIZE : (block + 1) * SIZE]) for block in blocks)
        assert whole == bytes(range(1, SIZE + 1))
        assert partial == bytes([*range(1, 25), *[0] * 8, *range(33, 57), *[0] * 8])

    run(scenario)


def test_two_payloads_never_share_a_block_and_the_third_waits_for_room() -> None:
    async def scenario(staging: Staging, memory: PoolMemory) -> None:
        async with staging.laid_out(chunk_of(1)) as one:
            async with staging.laid_out(chunk_of(2)) as two:
                assert len({*one, *two}) == 3
                waiting = asyncio.create_task(_laid_out(staging, 2))
                for _ in range(5):
                    await asyncio.sleep(0)
                assert not waiting.done()
            assert set(await waiting) == set(two)

    run(scenario)


def test_one_that_gives_up_leaves_its_room_to_others() -> None:
    async def scenario(staging: Staging, memory: PoolMemory) -> None:
        async with staging.laid_out(chunk_of(3)):
            waiting = [asyncio.create_task(_laid_out(staging, 3)) for _ in range(2)]
            await asyncio.sleep(0)
            waiting[0].cancel()
        assert len(await waiting[1]) == 3

    run(scenario)


def test_what_can_never_fit_is_known_before() -> None:
    async def scenario(staging: Staging, memory: PoolMemory) -> None:
        assert (staging.fits(3), staging.fits(4)) == (True, False)

    run(scenario)


async def _laid_out(staging: Staging, blocks: int) -> tuple[int, ...]:
    async with staging.laid_out(chunk_of(blocks)) as taken:
        return taken
