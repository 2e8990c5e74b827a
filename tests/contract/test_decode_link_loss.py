"""The link when an end of it dies, stops, hangs or restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from baton.core.errors import PeerUnavailable
from baton.core.telemetry import SilentMeter
from baton.core.types import DecodeRequest, TokenChunk
from baton.rpc.decode_link import DecodeLink
from baton.rpc.link import EnginePulse, LinkPolicy
from baton.rpc.serving import ServerPolicy, serve
from protos.baton.v1 import decode_pb2 as pb
from protos.baton.v1 import decode_pb2_grpc
from tests.contract.decode_streams import HANGS_SOON, REQUEST, collected, collected_ids, counting, endless, request
from tests.contract.wire_doubles import PATIENT, Relay, ScriptedDecode, link_to, served_decode, soon, until, wire

NONSENSE = 9  # the number of a stream that is opened without a request


class Beats:
    """An engine that never steps. Counts the worker's heartbeats."""

    def __init__(self, unfinished: int) -> None:
        self._pulse = EnginePulse(step=7, unfinished=unfinished)
        self._count = 0

    def __call__(self) -> EnginePulse:
        self._count += 1
        return self._pulse

    async def outlast(self, seconds: float, link: DecodeLink, policy: LinkPolicy) -> None:
        """A request of ``link`` still waits for its second token after as many beats as take ``seconds``."""
        stream = aiter(link.generate(REQUEST))
        await soon(anext(stream))
        wanted = self._count + seconds / policy.heartbeat
        second = asyncio.ensure_future(anext(stream))
        await until(lambda: self._count >= wanted or second.done())
        assert not second.done()
        second.cancel()


def test_the_death_of_the_worker_is_told_at_once() -> None:
    async def run() -> None:
        domain = ScriptedDecode(endless)
        async with wire(served_decode(domain), policy=ServerPolicy(drain=0)) as (server, _):
            link = link_to(server.address)
            streams = [aiter(link.generate(request(f"req-{n}"))) for n in range(8)]
            for stream in streams:
                await soon(anext(stream))
        for stream in streams:
            with pytest.raises(PeerUnavailable):
                await soon(anext(stream))
        with pytest.raises(PeerUnavailable):
            await soon(collected(link.generate(REQUEST)))
        await link.aclose()

    asyncio.run(run())


def test_a_link_with_nothing_to_say_stays_up_on_heartbeats_alone() -> None:
    async def run() -> None:
        policy = replace(PATIENT, silence=1.0, gateway_silence=1.0)
        beats = Beats(unfinished=0)
        service = served_decode(ScriptedDecode(endless), policy, pulse=beats)
        async with wire(service) as (server, _), link_to(server.address, policy) as link:
            await beats.outlast(2 * policy.silence, link, policy)

    asyncio.run(run())


def test_a_stopped_worker_is_noticed_though_its_connection_stays_open() -> None:
    async def run() -> None:
        domain = ScriptedDecode(endless)
        async with (
            wire(served_decode(domain)) as (server, _),
            Relay(server) as relay,
            link_to(relay.address, replace(PATIENT, silence=1.0)) as link,
        ):
            stream = aiter(link.generate(REQUEST))
            await soon(anext(stream))
            relay.freeze()
            with pytest.raises(PeerUnavailable, match="silent"):
                await soon(anext(stream))

    asyncio.run(run())


def test_the_requests_of_a_stopped_gateway_are_freed() -> None:
    async def run() -> None:
        domain = ScriptedDecode(endless)
        async with (
            wire(served_decode(domain, replace(PATIENT, gateway_silence=1.0))) as (server, _),
            Relay(server) as relay,
            link_to(relay.address, PATIENT) as link,
        ):
            stream = aiter(link.generate(REQUEST))
            await soon(anext(stream))
            relay.freeze()
            await until(lambda: not domain.running)
            assert domain.cancelled == ["req-1"]

    asyncio.run(run())


def test_a_hung_engine_is_noticed_though_its_front_answers() -> None:
    async def run() -> None:
        domain = ScriptedDecode(endless)
        service = served_decode(domain, HANGS_SOON, pulse=lambda: EnginePulse(step=7, unfinished=1))
        async with wire(service) as (server, _), link_to(server.address, HANGS_SOON) as link:
            stream = aiter(link.generate(REQUEST))
            await soon(anext(stream))
            with pytest.raises(PeerUnavailable, match="no engine step"):
                await soon(anext(stream))
            await until(lambda: not domain.running)

    asyncio.run(run())


def test_a_request_that_waits_is_not_taken_for_a_hung_engine() -> None:
    async def run() -> None:
        beats = Beats(unfinished=0)
        service = served_decode(ScriptedDecode(endless), HANGS_SOON, pulse=beats)
        async with wire(service) as (server, _), link_to(server.address, HANGS_SOON) as link:
            await beats.outlast(3 * HANGS_SOON.stall, link, HANGS_SOON)

    asyncio.run(run())


def test_a_link_that_fell_is_renewed_by_the_next_request() -> None:
    async def run() -> None:
        async with wire(served_decode(ScriptedDecode(endless))) as (server, _):
            port = server.port
            link = link_to(server.address)
            stream = aiter(link.generate(REQUEST))
            await soon(anext(stream))
        with pytest.raises(PeerUnavailable):
            await soon(anext(stream))
        service = served_decode(ScriptedDecode(counting))
        async with serve([service], f"127.0.0.1:{port}", SilentMeter(), ServerPolicy(drain=0)), link:
            assert len(await soon(collected_ids(link.generate(REQUEST)))) == 16

    asyncio.run(run())


def test_a_restarted_worker_is_refused_by_its_epoch() -> None:
    async def run() -> None:
        domain = ScriptedDecode(counting)
        async with wire(served_decode(domain, epoch=5)) as (server, _), link_to(server.address, epoch=4) as link:
            with pytest.raises(PeerUnavailable, match="restarted"):
                await soon(collected(link.generate(REQUEST)))
        assert domain.seen == []

    asyncio.run(run())


async def refused(call: AsyncIterable[pb.AttachResponse], stream: int) -> None:
    """Until the worker has said that there is something wrong with this stream."""
    async for message in call:
        if any(chunk.stream == stream and chunk.HasField("error") for chunk in message.chunks):
            return


def test_a_second_stream_of_a_session_cancels_the_first_ones_requests() -> None:
    async def run() -> None:
        order: list[str] = []
        may_leave = asyncio.Event()

        async def slow_to_leave(asked: DecodeRequest) -> AsyncIterator[TokenChunk]:
            name = asked.tokens.request_id
            order.append(f"{name} begins")
            try:
                yield TokenChunk(token_ids=(1,))
                await asyncio.Event().wait()
            finally:
                order.append(f"{name} is to end")
                await may_leave.wait()
                order.append(f"{name} ended")

        async def messages(name: str) -> AsyncIterator[pb.AttachRequest]:
            yield pb.AttachRequest(hello=pb.LinkHello(session_id="same", gateway_id="g", protocol_version=1))
            tokens = {"request_id": name, "prompt": [1]}
            yield pb.AttachRequest(open=pb.OpenRequest(stream=1, tokens=tokens))
            yield pb.AttachRequest(open=pb.OpenRequest(stream=NONSENSE))
            await asyncio.Event().wait()

        async with wire(served_decode(ScriptedDecode(slow_to_leave))) as (_, channel):
            stub = decode_pb2_grpc.DecodeServiceStub(channel.channel)
            first = stub.Attach(messages("old"))
            await until(lambda: order == ["old begins"])
            second = stub.Attach(messages("new"))
            await soon(refused(second, NONSENSE))  # so the one that was opened before it has been read, too
            assert order == ["old begins", "old is to end"]
            may_leave.set()
            await until(lambda: len(order) == 4)
            assert order == ["old begins", "old is to end", "old ended", "new begins"]
            first.cancel()
            second.cancel()

    asyncio.run(run())


def test_an_unreachable_worker_is_left_alone_for_a_while() -> None:
    async def run() -> None:
        async with wire(served_decode(ScriptedDecode(counting))) as (server, _):
            address = server.address
        async with link_to(address, replace(PATIENT, first_backoff=30.0, last_backoff=30.0)) as link:
            with pytest.raises(PeerUnavailable):
                await soon(collected(link.generate(REQUEST)))
            with pytest.raises(PeerUnavailable, match="a moment ago"):
                await soon(collected(link.generate(REQUEST)))

    asyncio.run(run())


@pytest.mark.parametrize("first_to_go", ["gateway", "worker"])
def test_a_link_that_ended_leaves_nothing_behind(first_to_go: str) -> None:
    async def run() -> None:
        before = asyncio.all_tasks()
        domain = ScriptedDecode(endless)
        async with AsyncExitStack() as worker, AsyncExitStack() as gateway:
            server, _ = await worker.enter_async_context(wire(served_decode(domain)))
            link = await gateway.enter_async_context(link_to(server.address))
            streams = [aiter(link.generate(request(f"req-{n}"))) for n in range(4)]
            for stream in streams:
                await soon(anext(stream))
            await (gateway if first_to_go == "gateway" else worker).aclose()
            for stream in streams:
                with pytest.raises(PeerUnavailable):
                    await soon(anext(stream))
        await until(lambda: asyncio.all_tasks() == before)
        assert not domain.running

    asyncio.run(run())
