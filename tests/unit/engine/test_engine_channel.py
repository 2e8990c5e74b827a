from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from baton.core.errors import InvalidRequest, Overloaded
from baton.core.types import EngineStats
from baton.engine.channel import AsyncChannel, ChannelClosed, SyncChannel
from baton.engine.messages import BlocksRead, Failed, Refused, StepReport, Write

PAYLOAD = bytes(range(256)) * 32_768  # 8 MiB: more than any socket buffer


def test_messages_and_payloads_cross_both_ways_intact() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        received: list[object] = []

        def engine() -> None:
            channel = SyncChannel(theirs)
            received.append(channel.receive())
            report = StepReport(((1, 2),), (BlocksRead(3, PAYLOAD), BlocksRead(4, b"")), EngineStats(steps=9), None)
            channel.send(report)
            channel.close()

        thread = threading.Thread(target=engine)
        thread.start()
        channel = await AsyncChannel.open(ours)
        channel.send(Write(1, 2, 3, PAYLOAD))
        await channel.drain()
        report = await channel.receive()
        assert report == StepReport(((1, 2),), (BlocksRead(3, PAYLOAD), BlocksRead(4, b"")), EngineStats(steps=9), None)
        assert received == [Write(1, 2, 3, PAYLOAD)]
        with pytest.raises(ChannelClosed):
            await channel.receive()
        await channel.close()
        thread.join()

    asyncio.run(main())


def test_errors_keep_their_type_and_fields() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        here, there = SyncChannel(ours), SyncChannel(theirs)
        here.send(Failed(1, Overloaded("full", retry_after=2.5)))
        here.send(Refused(2, InvalidRequest("bad", field="prompt")))
        overloaded, invalid = there.receive().error, there.receive().error
        assert (type(overloaded), overloaded.message, overloaded.retry_after) == (Overloaded, "full", 2.5)
        assert (type(invalid), invalid.message, invalid.field) == (InvalidRequest, "bad", "prompt")


def test_the_engine_end_notices_that_the_front_has_gone() -> None:
    ours, theirs = socket.socketpair()
    channel = SyncChannel(theirs)
    assert not channel.is_readable(0)
    ours.close()
    assert channel.is_readable(None)
    with pytest.raises(ChannelClosed):
        channel.receive()
    with pytest.raises(ChannelClosed):
        channel.send("anything")
    channel.close()


def test_sending_to_an_engine_that_has_gone_is_harmless() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        channel = await AsyncChannel.open(ours)
        theirs.close()
        for _ in range(3):
            channel.send(Write(1, 2, 3, PAYLOAD))
            await asyncio.sleep(0)
        with pytest.raises(ChannelClosed):
            await channel.receive()
        await channel.close()

    asyncio.run(main())
