from __future__ import annotations

import asyncio

import pytest

from baton.rpc.link import first_of


def test_the_first_to_end_ends_the_others() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("forever")

    async def short() -> None:
        await asyncio.sleep(0)

    asyncio.run(first_of(forever(), short()))
    assert ended == ["forever"]


def test_the_failure_of_the_first_is_raised() -> None:
    async def fails() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        asyncio.run(first_of(asyncio.Event().wait(), fails()))


def test_cancelling_it_cancels_all() -> None:
    async def run() -> None:
        cancelled: list[int] = []

        async def forever(number: int) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(number)
                raise

        task = asyncio.create_task(first_of(forever(1), forever(2)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(cancelled) == [1, 2]

    asyncio.run(run())
