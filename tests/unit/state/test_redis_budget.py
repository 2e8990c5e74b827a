"""One call to Redis: it ends in time and when it is cancelled, even if the library underneath hears of neither."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress

import pytest

from baton.core.errors import StateUnavailable
from baton.state.config import StateConfig
from baton.state.redis_client import within, within_budget

PATIENT = StateConfig(timeout_ms=60_000)
QUICK = StateConfig(timeout_ms=1, connect_timeout_ms=1)


async def deaf_call() -> str:
    """Ends as ``asyncio.wait_for`` of Python 3.11 does when the cancellation comes with the result."""
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    return "an answer"


def test_a_cancellation_that_the_library_loses_is_not_lost() -> None:
    async def heartbeat() -> None:
        while True:
            await within_budget(deaf_call(), PATIENT, "register")

    async def run() -> None:
        task = asyncio.create_task(heartbeat())
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=20)
        assert done and task.cancelled()

    asyncio.run(run())


def test_a_budget_that_the_library_overhears_is_kept() -> None:
    with pytest.raises(StateUnavailable, match="within 2 ms"):
        asyncio.run(within_budget(deaf_call(), QUICK, "register"))


def test_a_cancellation_before_the_call_does_not_end_it_twice() -> None:
    async def run() -> str:
        async def answer() -> str:
            return "an answer"

        async def settle() -> str:
            """What a task does in its ``finally``, already cancelled."""
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return await within_budget(answer(), PATIENT, "deregister")

        task = asyncio.create_task(settle())
        await asyncio.sleep(0)
        task.cancel()
        return await task

    assert asyncio.run(run()) == "an answer"


def test_an_answer_that_lies_unread_while_this_process_is_busy_is_no_outage() -> None:
    async def run() -> str:
        loop, (reading, writing) = asyncio.get_running_loop(), os.pipe()
        arrived = loop.create_future()
        loop.add_reader(reading, lambda: arrived.done() or arrived.set_result(os.read(reading, 9)))

        async def call() -> str:
            """Its answer comes at once, and is read in two turns of the loop."""
            os.write(writing, b"answer")
            loop.call_soon(time.sleep, 0.05)  # requests of a burst, all due in this turn
            answer: bytes = await arrived
            await asyncio.sleep(0)
            return answer.decode()

        try:
            return await within(call(), 0.01, "reserve")
        finally:
            loop.remove_reader(reading)
            os.close(reading)
            os.close(writing)

    assert asyncio.run(run()) == "answer"
