from __future__ import annotations

import asyncio
import itertools
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import InvalidRequest, Overloaded
from baton.core.types import EngineStats, FilledBlocks
from baton.engine.channel import READ_AHEAD, AsyncChannel, ChannelClosed, SyncChannel, _encode, _Frames
from baton.engine.messages import Answered, BlockReport, BlocksRead, Drawn, Failed, Filled, Refused, StepReport, Write

PAYLOAD = bytes(range(256)) * 32_768  # 8 MiB: more than any socket buffer


def test_messages_and_payloads_cross_both_ways_intact() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        received: list[object] = []
        events = (BlocksRead(3, PAYLOAD), BlocksRead(4, b""))

        def engine() -> None:
            channel = SyncChannel(theirs)
            received.append(channel.receive())
            report = StepReport(Drawn((1,), (2,)), events, EngineStats(steps=9), None)
            channel.send(report)
            channel.close()

        thread = threading.Thread(target=engine)
        thread.start()
        channel = await AsyncChannel.open(ours)
        channel.send(Write(1, 2, 3, PAYLOAD))
        await channel.drain()
        report = await channel.receive()
        assert report == StepReport(Drawn((1,), (2,)), events, EngineStats(steps=9), None)
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


SIZES = st.one_of(
    st.integers(0, 40), st.sampled_from([READ_AHEAD // 2, READ_AHEAD // 2 + 1, READ_AHEAD, 3 * READ_AHEAD])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=5), st.lists(st.integers(1, 70_000), min_size=1))
def test_messages_come_out_whole_however_the_bytes_come_in(sizes: list[tuple[int, int]], reads: list[int]) -> None:
    sent = [
        StepReport(
            Drawn((i,), (i,)), (BlocksRead(1, PAYLOAD[:one]), BlocksRead(2, PAYLOAD[1 : two + 1])), EngineStats(), None
        )
        for i, (one, two) in enumerate(sizes)
    ]
    stream = memoryview(b"".join(piece for message in sent for piece in _encode(message)))

    async def main() -> list[object]:
        frames, at = _Frames(), 0
        for size in itertools.cycle(reads):
            room = frames.get_buffer(-1)
            count = min(size, len(room), len(stream) - at)
            room[:count] = stream[at : at + count]
            room.release()
            frames.buffer_updated(count)
            at += count
            if at == len(stream):
                break
        return [await frames.messages.get() for _ in sent]

    assert asyncio.run(main()) == sent


def test_what_becomes_of_blocks_is_told_of_in_short_only_where_nothing_else_has_happened() -> None:
    filled = Filled(4, FilledBlocks(0, 1, 16), is_last=True)
    ended = [Answered(1, b"digests"), filled, Refused(2, InvalidRequest("no", field="x"))]
    assert BlockReport.of(ended) == BlockReport(tuple(ended))
    assert BlockReport.of([*ended, Failed(3, InvalidRequest("no", field="x"))]) is None
