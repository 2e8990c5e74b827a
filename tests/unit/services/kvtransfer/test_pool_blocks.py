"""What a front reads in its worker's own pool: blocks as they travel, and their checksums."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.core.errors import TransportUnavailable
from baton.core.types import FilledBlocks, KvFormat
from baton.engine.blockcopy import PLAIN
from baton.engine.native.block_copy import best_block_copy
from services.kvtransfer.checksum import block_checksums
from services.kvtransfer.layout import pack
from services.kvtransfer.pool_blocks import PoolBlocks, in_turns, pool_blocks

LAYOUT = KvFormat("bfloat16", 4, 3, 2, 8)  # 768 bytes a block, which native code takes
SIZE = LAYOUT.block_bytes
POOL = bytes((7 * at + at // SIZE) % 251 for at in range(9 * SIZE))
NUMBERS = (7, 2, 5, 0)


class Run:
    def block_ids(self, first_block: int, block_count: int) -> tuple[int, ...]:
        return NUMBERS[first_block : first_block + block_count]


RUN: Any = Run()


class Pool:
    view = memoryview(POOL)


@pytest.mark.parametrize("filled", [1, 3, 4])
@pytest.mark.parametrize("block_copy", [PLAIN, best_block_copy()], ids=["plain", "best"])
def test_pieces_and_checksums_are_of_the_filled_slots_in_the_order_of_the_sequence(
    block_copy: Any, filled: int
) -> None:
    blocks = FilledBlocks(1, 3, 4 * 3 + filled)
    whole = b"".join(POOL[number * SIZE : (number + 1) * SIZE] for number in NUMBERS[1:])
    with pool_blocks(Pool(), LAYOUT, block_copy) as here:  # type: ignore[arg-type]
        assert here is not None
        travelling = b"".join(here.pieces(RUN, blocks))
        checksums = asyncio.run(here.checksums(RUN, blocks))
    assert travelling == pack(whole, LAYOUT, filled)
    assert checksums == block_checksums(travelling, 1, 3, SIZE)


def test_once_the_worker_is_ending_nothing_is_digested() -> None:
    here = PoolBlocks(memoryview(POOL), LAYOUT, PLAIN)
    here.close()
    with pytest.raises(TransportUnavailable, match="ending"):
        asyncio.run(here.checksums(RUN, FilledBlocks(0, 1, 4)))


def test_blocks_are_taken_in_turns_between_which_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvtransfer.pool_blocks.TURN_BYTES", 2 * SIZE)
    events: list[object] = []

    def work(turn: range) -> list[bytes]:
        events.append(turn)
        return [bytes([number]) for number in turn]

    async def main() -> None:
        working = asyncio.create_task(in_turns(5, LAYOUT, work))
        while not working.done():
            await asyncio.sleep(0)
            events.append("loop")
        assert await working == (b"\0", b"\1", b"\2", b"\3", b"\4")

    asyncio.run(main())
    assert events == [range(2), "loop", range(2, 4), "loop", range(4, 5), "loop"]


def test_checksums_in_turns_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = FilledBlocks(0, 4, 15)
    with pool_blocks(Pool(), LAYOUT, best_block_copy()) as here:  # type: ignore[arg-type]
        assert here is not None
        expected = asyncio.run(here.checksums(RUN, blocks))
        for turn in (1, 2 * SIZE, 16 * SIZE):
            monkeypatch.setattr("services.kvtransfer.pool_blocks.TURN_BYTES", turn)
            assert asyncio.run(here.checksums_in_turns(RUN, blocks)) == expected
