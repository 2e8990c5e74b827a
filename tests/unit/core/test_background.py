"""Work beside a block ends with it, and its failure is the block's."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.background import background


async def for_ever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("work")


def test_work_has_ended_when_the_block_has() -> None:
    async def run() -> None:
        ended: list[str] = []
        async with background(for_ever(ended), "work"):
            await asyncio.sleep(0)
        assert ended == ["work"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_failing_work_ends_the_block_with_its_own_error() -> None:
    async def fails() -> None:
        raise KeyError("bug")

    async def run() -> None:
        with pytest.raises(KeyError, match="bug"):
            async with background(fails(), "work"):
                await asyncio.Event().wait()

    asyncio.run(run())


def test_error_of_the_block_passes_unwrapped() -> None:
    async def run() -> None:
        ended: list[str] = []
        with pytest.raises(ValueError, match="block"):
            async with background(for_ever(ended), "work"):
                await asyncio.sleep(0)
                raise ValueError("block")
        assert ended == ["work"]

    asyncio.run(run())


def test_cancelling_the_block_cancels_the_work() -> None:
    async def block(ended: list[str]) -> None:
        async with background(for_ever(ended), "work"):
            await asyncio.Event().wait()

    async def run() -> None:
        ended: list[str] = []
        task = asyncio.create_task(block(ended))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["work"]

    asyncio.run(run())
