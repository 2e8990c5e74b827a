"""One call to Redis: it ends in time and when it is cancelled, even if the library underneath hears of neither."""

from __future__ import annotations

import asyncio
import os
import selectors
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from baton.core.errors import StateUnavailable
from baton.state.config import StateConfig
from baton.state.redis_client import LOOKS, Patience, while_heard, within, within_budget

PATIENT = StateConfig(timeout_ms=60_000)
QUICK = StateConfig(timeout_ms=1, connect_timeout_ms=1)
BIT_BY_BIT = Patience(silence=0.05, longest=1.0)
T = TypeVar("T")


class _NobodySelects(selectors.SelectSelector):
    """Time passes as soon as everybody waits for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "all wait for something that never comes"
        self.now += timeout
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    """Of tasks that wait for each other and for time only: it takes none."""

    def __init__(self) -> None:
        self._selecting = _NobodySelects()
        super().__init__(self._selecting)

    def time(self) -> float:
        return self._selecting.now


def in_no_time(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """What it came to, and the seconds that passed for it."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work), runner.get_loop().time()


async def ended(patience: Patience, *pauses: float) -> str:
    """A call with an answer after each of the pauses, and why it failed; "" when it did not."""

    async def call(heard: Callable[[], None]) -> str:
        for pause in pauses:
            await asyncio.sleep(pause)
            heard()
        return ""

    try:
        return await while_heard(call, patience, "quota")
    except StateUnavailable as error:
        return error.message


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


def test_a_call_that_is_answered_bit_by_bit_may_take_longer_than_the_silence_that_ends_it() -> None:
    assert in_no_time(ended(BIT_BY_BIT, *[0.045] * 20)) == ("", pytest.approx(0.9))


def test_a_call_ends_with_the_silence_after_the_last_answer() -> None:
    why, seconds = in_no_time(ended(BIT_BY_BIT, 0.04, 0.04, 30.0))
    assert why == "quota: Redis did not answer within 50 ms"
    assert 0.08 + 0.05 <= seconds <= 0.08 + 0.05 + 0.05 / LOOKS


def test_a_call_without_any_answer_ends_with_its_first_silence() -> None:
    assert in_no_time(ended(BIT_BY_BIT, 30.0)) == ("quota: Redis did not answer within 50 ms", pytest.approx(0.05))


def test_a_call_that_is_answered_for_ever_ends_all_the_same() -> None:
    why, seconds = in_no_time(ended(BIT_BY_BIT, *[0.04] * 1000))
    assert (why, seconds) == ("quota: Redis did not answer within 1000 ms", pytest.approx(1.0))
