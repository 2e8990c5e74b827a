from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from baton.core.errors import PeerUnavailable
from baton.engine.mailbox import Mailbox


def test_gives_what_came_before_the_failure_and_then_the_failure_to_everyone() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox()
        mailbox.put(1)
        mailbox.fail(PeerUnavailable("first"))
        mailbox.fail(PeerUnavailable("second"))
        assert await mailbox.get() == 1
        for _ in range(2):
            with pytest.raises(PeerUnavailable, match="first"):
                await mailbox.get()

    asyncio.run(main())


def test_a_stream_ends_when_closed_even_if_it_fails_afterwards() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox()
        mailbox.put(1)
        mailbox.put(2)
        mailbox.close()
        mailbox.fail(PeerUnavailable("late"))
        assert [item async for item in mailbox.stream()] == [1, 2]

    asyncio.run(main())


def test_wakes_a_waiting_reader() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox()
        reading = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        assert not reading.done()
        mailbox.put(5)
        assert await reading == 5

    asyncio.run(main())


def test_a_cancelled_reader_loses_nothing() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox()
        reading = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        mailbox.put(5)
        reading.cancel()
        await asyncio.wait({reading})
        if reading.cancelled():
            assert await mailbox.get() == 5

    asyncio.run(main())


def test_a_limit_keeps_the_newest() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox(limit=2)
        for i in range(5):
            mailbox.put(i)
        mailbox.close()
        async with aclosing(mailbox.stream()) as stream:
            assert [item async for item in stream] == [3, 4]

    asyncio.run(main())
