"""Calls of the quota scripts: bursts share a connection, and nobody waits behind a server that does not answer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any, cast

import fakeredis
import pytest
from fakeredis.aioredis import FakeAsyncRedisConnection

from baton.core.errors import StateUnavailable
from baton.state.quota.scripts import BATCH, Scripts
from baton.state.redis_client import Patience

SECONDS = 20.0
PREFIX = "baton:{umbrella}:quota:"
KEYS = (f"{PREFIX}open",)


class WatchedRedis(fakeredis.FakeAsyncRedis):
    """Counts round trips, each of which waits until the server is ``answering``; may refuse scripts' texts."""

    def __init__(self) -> None:
        self.answering = asyncio.Event()
        self.answering.set()
        self.batches: list[int] = []
        self.takes_texts = True
        self.seconds_an_answer = 0.0
        watch, pause = self._watch, self._pause

        class WatchedConnection(FakeAsyncRedisConnection):
            async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
                await super().send_packed_command([await watch(b"".join(command))], check_health)

            async def read_response(self, *arguments: Any, **options: Any) -> Any:
                await pause()
                return await super().read_response(*arguments, **options)

        super().__init__(server=fakeredis.FakeServer(), protocol=2, connection_class=WatchedConnection)

    async def _watch(self, commands: bytes) -> bytes:
        if calls := commands.count(b"EVALSHA"):
            self.batches.append(calls)
            await self.answering.wait()
        return commands if self.takes_texts else commands.replace(b"LOAD", b"NONE")

    async def _pause(self) -> None:
        await asyncio.sleep(self.seconds_an_answer)


def run(body: Callable[[Scripts, WatchedRedis], Awaitable[None]], budget: float = 30.0) -> None:
    """Whoever waits in vain fails: a budget is longer than ``SECONDS`` where it is not to end."""

    async def main() -> None:
        async with WatchedRedis() as client, asyncio.timeout(SECONDS):
            await body(Scripts(client, Patience(budget, 30.0)), client)

    asyncio.run(main())


async def renew(scripts: Scripts, name: str) -> list[bytes]:
    """A call whose answer tells that it ran."""
    return cast("list[bytes]", await scripts.call("renew", KEYS, 1_000_000, f"acme/{name}", "owner", "0 0 0"))


def test_calls_that_come_while_others_are_on_their_way_go_together() -> None:
    async def body(scripts: Scripts, client: WatchedRedis) -> None:
        await renew(scripts, "first")
        client.batches.clear()
        answers = await asyncio.gather(*(renew(scripts, f"a{number}") for number in range(2 * BATCH + 10)))
        assert answers == [[b"missing"]] * (2 * BATCH + 10)
        assert client.batches == [BATCH, BATCH, 10]

    run(body)


def test_a_server_that_knows_no_script_is_sent_it_once() -> None:
    async def body(scripts: Scripts, client: WatchedRedis) -> None:
        assert await asyncio.gather(*(renew(scripts, f"a{number}") for number in range(5))) == [[b"missing"]] * 5
        assert client.batches == [5, 5]
        await renew(scripts, "b")
        assert client.batches == [5, 5, 1]

    run(body)


def test_one_connection_is_enough_to_call_a_script_that_the_server_does_not_know() -> None:
    async def body(scripts: Scripts, client: WatchedRedis) -> None:
        client.connection_pool.max_connections = 1
        assert await renew(scripts, "a") == [b"missing"]

    run(body)


def test_a_server_that_refuses_a_scripts_text_is_unavailable() -> None:
    async def body(scripts: Scripts, client: WatchedRedis) -> None:
        client.takes_texts = False
        with pytest.raises(StateUnavailable, match="load a quota script"):
            await renew(scripts, "a")

    run(body)


def test_a_slow_server_that_goes_on_answering_is_waited_for_beyond_one_silence() -> None:
    async def body(scripts: Scripts, client: WatchedRedis) -> None:
        await renew(scripts, "first")
        client.seconds_an_answer = 0.15
        answers = await asyncio.gather(*(renew(scripts, f"a{number}") for number in range(10)))
        assert answers == [[b"missing"]] * 10, "ten answers take three silences"

    run(body, budget=0.5)


def test_whoever_waits_behind_a_batch_without_an_answer_fails_with_it() -> None:
    async def body(scripts: Scripts, client: WatchedRedis) -> None:
        client.answering.clear()
        calls = (renew(scripts, f"a{number}") for number in range(3 * BATCH))
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(error) for error in failed} == {StateUnavailable}
        client.answering.set()
        assert await renew(scripts, "later") == [b"missing"]
        assert client.batches == [BATCH, 1, 1], "nobody was sent after the first batch; the last one with its script"

    run(body, budget=0.2)


def test_a_caller_that_left_a_batch_without_an_answer_leaves_the_others_their_failure() -> None:
    async def body(scripts: Scripts, client: WatchedRedis) -> None:
        client.answering.clear()
        calls = [asyncio.create_task(renew(scripts, f"a{number}")) for number in range(3)]
        while not client.batches:
            await asyncio.sleep(0)
        calls[0].cancel()
        left, *failed = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(left, asyncio.CancelledError)
        assert [str(error) for error in failed] == ["quota renew: quota: Redis did not answer within 200 ms"] * 2

    run(body, budget=0.2)


def test_a_bug_in_the_sending_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    async def body(scripts: Scripts, client: WatchedRedis) -> None:
        async def broken() -> None:
            raise LookupError("a bug")

        client.connection_pool.get_connection = broken  # type: ignore[method-assign]
        calls = (renew(scripts, f"a{number}") for number in range(BATCH + 1))
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(error) for error in failed} == {StateUnavailable}

    run(body)
    gc.collect()
    assert "LookupError: a bug" in caplog.text, "it is told where bugs are told"


def test_a_server_that_answers_again_is_asked_again() -> None:
    async def body(scripts: Scripts, client: WatchedRedis) -> None:
        client.answering.clear()
        with pytest.raises(StateUnavailable, match="quota renew"):
            await renew(scripts, "a")
        client.answering.set()
        while True:
            try:
                assert await renew(scripts, "b") == [b"missing"]
                break
            except StateUnavailable:
                await asyncio.sleep(0)

    run(body, budget=0.5)


def test_a_caller_that_leaves_takes_nobody_with_it() -> None:
    async def body(scripts: Scripts, client: WatchedRedis) -> None:
        client.answering.clear()
        calls = [asyncio.create_task(renew(scripts, f"a{number}")) for number in range(BATCH + 2)]
        while not client.batches:
            await asyncio.sleep(0)
        for leaving in (0, BATCH):  # one under way, one that still waits
            calls[leaving].cancel()
        client.answering.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [
            number in {0, BATCH} for number in range(BATCH + 2)
        ]
        assert client.batches[-1] == 1

    run(body)


def test_a_lone_caller_that_leaves_leaves_the_others_an_answer() -> None:
    async def body(scripts: Scripts, client: WatchedRedis) -> None:
        client.answering.clear()
        leaving = asyncio.create_task(renew(scripts, "alone"))
        while not client.batches:
            await asyncio.sleep(0)
        others = [asyncio.create_task(renew(scripts, f"a{number}")) for number in range(3)]
        await asyncio.sleep(0)
        leaving.cancel()
        client.answering.set()
        assert await asyncio.gather(*others) == [[b"missing"]] * 3
        assert leaving.cancelled()
        assert client.batches == [1, 3, 3], "what the server does not know yet is sent again"

    run(body)


def test_a_caller_that_leaves_before_it_was_sent_is_not() -> None:
    async def body(scripts: Scripts, client: WatchedRedis) -> None:
        leaving = asyncio.create_task(renew(scripts, "alone"))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        assert leaving.cancelled()
        assert await renew(scripts, "another") == [b"missing"]
        assert client.batches == [1, 1], "the second time with the script known"

    run(body)


def test_a_script_that_fails_is_its_callers_failure_only() -> None:
    async def body(scripts: Scripts, client: WatchedRedis) -> None:
        await client.hset(f"{PREFIX}r:acme/broken", "a", "hash and no text")
        broken, sound = await asyncio.gather(renew(scripts, "broken"), renew(scripts, "sound"), return_exceptions=True)
        assert isinstance(broken, StateUnavailable)
        assert sound == [b"missing"]

    run(body)
