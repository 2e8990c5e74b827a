"""Deadlines: waits end with Expired or with what cut them, and what was waited for is cancelled then."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.deadline import Deadline
from baton.core.errors import Cancelled, Expired


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


def test_a_limit_ends_a_wait_that_has_begun_and_tells_its_name() -> None:
    async def run() -> None:
        deadline = Deadline.after(3600)
        wait = asyncio.ensure_future(deadline.within(asyncio.Event().wait(), "the moon"))
        await asyncio.sleep(0)
        deadline.limit(0.01, "a limit of 0.01 s")
        with pytest.raises(Expired, match=r"while waiting for the moon \(a limit of 0.01 s\)$"):
            async with asyncio.timeout(20):
                await wait

    asyncio.run(run())


def test_a_limit_never_gives_more_time_and_is_not_blamed_then() -> None:
    async def run() -> None:
        deadline = Deadline.after(0.01)
        deadline.limit(3600, "a limit")
        with pytest.raises(Expired) as raised:
            async with asyncio.timeout(20):
                await deadline.within(asyncio.Event().wait(), "the moon")
        assert "limit" not in raised.value.message
        assert deadline.explained(raised.value) is raised.value

    asyncio.run(run())


def test_what_others_say_of_the_time_they_were_given_is_told_with_the_limits_name_once() -> None:
    async def run() -> None:
        deadline = Deadline.after(None)
        deadline.limit(3600, "a limit")
        told = deadline.explained(Expired("too late"))
        assert told.message == "too late (a limit)"
        assert deadline.explained(told) is told

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


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_a_cut_ends_every_wait_present_or_future(seconds: float | None) -> None:
    async def run() -> None:
        deadline = Deadline.after(seconds)
        waits = [asyncio.create_task(deadline.within(asyncio.Event().wait(), "it")) for _ in range(3)]
        await asyncio.sleep(0)
        deadline.cut(Cancelled("taken over"))
        for wait in waits:
            with pytest.raises(Cancelled, match="taken over"):
                await wait
        with pytest.raises(Cancelled, match="taken over"):
            await deadline.within(asyncio.Event().wait(), "it")
        with pytest.raises(Cancelled, match="taken over"):
            deadline.check("it")

    asyncio.run(run())


def test_a_cut_finds_waits_that_are_ending_already() -> None:
    async def run() -> None:
        ending, end = asyncio.Event(), asyncio.Event()

        async def ends_slowly() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await end.wait()

        deadline = Deadline.after(0.01)
        wait = asyncio.create_task(deadline.within(ends_slowly(), "it"))
        await ending.wait()
        deadline.cut(Cancelled("taken over"))
        end.set()
        with pytest.raises(Cancelled, match="taken over"):
            await wait

    asyncio.run(run())


def test_a_check_tells_what_a_wait_would() -> None:
    async def run() -> None:
        Deadline.after(None).check("it")
        Deadline.after(60).check("it")
        with pytest.raises(Expired, match="waiting for it"):
            Deadline.after(0).check("it")

    asyncio.run(run())
