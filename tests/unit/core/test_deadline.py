"""Deadlines: waits end with Expired, what was waited for is cancelled, other time-outs are left alone."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.deadline import Deadline
from baton.core.errors import Expired


def test_wait_that_outlasts_the_deadline_is_cancelled_and_expired() -> None:
    async def run() -> None:
        cancelled = asyncio.Event()

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        with pytest.raises(Expired, match="deadline passed while waiting for the moon"):
            await Deadline.after(0.01).within(waits(), "the moon")
        assert cancelled.is_set()

    asyncio.run(run())


def test_result_in_time_is_returned() -> None:
    async def run() -> None:
        assert await Deadline.after(60).within(asyncio.sleep(0, "done"), "it") == "done"
        assert await Deadline.after(None).within(asyncio.sleep(0, "done"), "it") == "done"

    asyncio.run(run())


def test_time_out_of_the_work_itself_is_not_taken_for_the_deadline() -> None:
    async def gives_up() -> None:
        raise TimeoutError("its own")

    async def run() -> None:
        with pytest.raises(TimeoutError, match="its own"):
            await Deadline.after(60).within(gives_up(), "it")

    asyncio.run(run())


def test_remaining_never_goes_below_zero() -> None:
    async def run() -> None:
        assert Deadline.after(None).remaining() is None
        assert Deadline.after(-5).remaining() == 0.0
        left = Deadline.after(60).remaining()
        assert left is not None
        assert 0 < left <= 60

    asyncio.run(run())
