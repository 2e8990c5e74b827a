"""The link between a gateway and a worker while both are well: batching, deadlines, slow readers, drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest
import uvloop

from baton.core.errors import BatonError, Cancelled, Expired, Overloaded
from baton.core.types import DecodeRequest, FinishReason, TokenChunk
from baton.rpc import decode_service
from baton.rpc.decode_link import DecodeLink
from baton.rpc.serving import RunningServer, ServerPolicy
from protos.baton.v1 import decode_pb2 as pb
from protos.baton.v1 import decode_pb2_grpc
from tests.contract.decode_streams import REQUEST, collected, collected_ids, counting, endless, request
from tests.contract.wire_doubles import PATIENT, ScriptedDecode, decode, link_to, served_decode, soon, until, wire


def test_a_bug_in_the_worker_ends_its_request_only() -> None:
    async def buggy(asked: DecodeRequest) -> AsyncIterator[TokenChunk]:
        if asked.tokens.request_id == "bad":
            raise ZeroDivisionError("secret")
        async for chunk in counting(asked):
            yield chunk

    async def run() -> None:
        async with decode("wire", ScriptedDecode(buggy)) as worker:
            good = asyncio.create_task(collected_ids(worker.generate(request("good", 50))))
            with pytest.raises(BatonError) as raised:
                await soon(collected(worker.generate(request("bad"))))
            assert type(raised.value) is BatonError
            assert "secret" not in raised.value.message
            assert "bad" in raised.value.message
            assert len(await soon(good)) == 50

    asyncio.run(run())


def test_a_link_works_the_same_on_uvloop() -> None:
    async def run() -> None:
        domain = ScriptedDecode(counting)
        async with decode("wire", domain) as worker:
            answers = await soon(asyncio.gather(*(collected_ids(worker.generate(request(f"r{n}"))) for n in range(8))))
            assert all(len(answer) == 16 for answer in answers)
            async with aclosing(worker.generate(request("abandoned", 10**6))) as stream:  # type: ignore[type-var]
                await soon(anext(stream))
            await until(lambda: not domain.running)

    uvloop.run(run())


def test_chunks_of_one_engine_step_share_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 requests that step together need about a message a step, not one a token."""
    sent: list[int] = []

    class CountingOutbox(decode_service._Outbox):
        def message(self) -> decode_service.pb.AttachResponse | None:
            message = super().message()
            if message is not None and message.chunks:
                sent.append(len(message.chunks))
            return message

    monkeypatch.setattr(decode_service, "_Outbox", CountingOutbox)

    async def run() -> None:
        step = asyncio.Condition()
        steps = 10

        async def stepping(_: DecodeRequest) -> AsyncIterator[TokenChunk]:
            for index in range(steps):
                async with step:
                    await step.wait()
                yield TokenChunk(token_ids=(index,))

        async def engine(domain: ScriptedDecode, tasks: list[asyncio.Task[list[int]]]) -> None:
            await until(lambda: len(domain.running) == len(tasks))
            while domain.running:
                async with step:
                    step.notify_all()
                await asyncio.sleep(0.005)

        domain = ScriptedDecode(stepping)
        async with decode("wire", domain) as worker:
            tasks = [asyncio.create_task(collected_ids(worker.generate(request(f"req-{n}")))) for n in range(32)]
            await soon(engine(domain, tasks))
            answers = await soon(asyncio.gather(*tasks))
        assert all(len(answer) == steps for answer in answers)
        tokens = 32 * steps
        assert sum(sent) == tokens + 32  # and one end each
        assert len(sent) <= 3 * steps, sent

    asyncio.run(run())


def test_the_deadline_travels_and_ends_the_request_at_the_worker() -> None:
    async def run() -> None:
        domain = ScriptedDecode(endless)
        async with decode("wire", domain) as worker:
            with pytest.raises(Expired):
                await soon(collected(worker.generate(request("late", timeout=0.2))))
            timeout = domain.seen[0].tokens.timeout
            assert timeout is not None
            assert 0 < timeout <= 0.2
            await until(lambda: not domain.running)

    asyncio.run(run())


def test_the_worker_keeps_the_deadline_even_if_the_gateway_forgets_it() -> None:
    async def run() -> None:
        domain = ScriptedDecode(endless)
        answered = asyncio.Event()
        async with wire(served_decode(domain)) as (_, channel):

            async def opening() -> AsyncIterator[pb.AttachRequest]:
                yield pb.AttachRequest(hello=pb.LinkHello(session_id="s", gateway_id="g", protocol_version=1))
                tokens = {"request_id": "req-1", "prompt": [1], "timeout_seconds": 0.1}
                yield pb.AttachRequest(open=pb.OpenRequest(stream=1, tokens=tokens))
                await answered.wait()

            call = decode_pb2_grpc.DecodeServiceStub(channel.channel).Attach(opening())
            reasons: list[str] = []
            async for message in call:
                reasons += [chunk.error.reason for chunk in message.chunks if chunk.last]
                if reasons:
                    answered.set()
        assert reasons == ["EXPIRED"]

    asyncio.run(run())


def test_a_reader_that_stops_reading_is_cancelled_and_the_others_are_not() -> None:
    async def mixed(asked: DecodeRequest) -> AsyncIterator[TokenChunk]:
        async for chunk in counting(asked):
            yield chunk
        if asked.tokens.request_id == "asleep":
            await asyncio.Event().wait()

    async def run() -> None:
        domain = ScriptedDecode(mixed)
        policy = replace(PATIENT, idle_reader=0.2)
        async with wire(served_decode(domain)) as (server, _), link_to(server.address, policy) as link:
            asleep = aiter(link.generate(request("asleep", 400)))
            await soon(anext(asleep))
            awake = asyncio.create_task(collected_ids(link.generate(request("awake", 2000))))
            await until(lambda: domain.cancelled == ["asleep"])
            assert len(await soon(awake)) == 2000
            with pytest.raises(Cancelled, match="not read"):
                await soon(anext(asleep))

    asyncio.run(run())


def test_a_finished_answer_waits_for_a_slow_reader_without_holding_the_worker() -> None:
    async def run() -> None:
        domain = ScriptedDecode(counting)
        policy = replace(PATIENT, idle_reader=0.1)
        async with wire(served_decode(domain)) as (server, _), link_to(server.address, policy) as link:
            stream = aiter(link.generate(request("slow", 50)))
            first = await soon(anext(stream))
            await until(lambda: server.in_flight == 0)
            assert [*first.token_ids, *await soon(collected_ids(stream))] == list(range(50))

    asyncio.run(run())


def test_a_worker_that_sends_more_than_was_asked_for_is_cut_off() -> None:
    async def flood(_: DecodeRequest) -> AsyncIterator[TokenChunk]:
        while True:
            yield TokenChunk(token_ids=(1,))
            await asyncio.sleep(0)

    async def run() -> None:
        domain = ScriptedDecode(flood)
        async with decode("wire", domain) as worker:
            stream = aiter(worker.generate(request("flooded", max_tokens=4)))
            await soon(anext(stream))
            await until(lambda: not domain.running)
            with pytest.raises(BatonError, match="more chunks"):
                await soon(collected(stream))

    asyncio.run(run())


def test_a_draining_worker_refuses_new_requests_and_finishes_running_ones() -> None:
    async def run() -> None:
        finish = asyncio.Event()

        async def patient(asked: DecodeRequest) -> AsyncIterator[TokenChunk]:
            yield TokenChunk(token_ids=(1,))
            await finish.wait()
            yield TokenChunk(token_ids=(2,), finish=FinishReason.LENGTH)

        async with wire(served_decode(ScriptedDecode(patient))) as (server, _), link_to(server.address) as link:
            stream = aiter(link.generate(REQUEST))
            await soon(anext(stream))
            drain = asyncio.create_task(server.drain(20))
            await until(lambda: server._calls._draining)
            with pytest.raises(Overloaded, match="draining"):
                await soon(collected(link.generate(request("new"))))
            assert server.in_flight == 1
            finish.set()
            assert [chunk.token_ids async for chunk in stream] == [(2,)]
            assert await soon(drain)

    asyncio.run(run())


def test_the_last_chunks_reach_the_gateway_when_the_server_stops_after_its_drain() -> None:
    async def run() -> None:
        go_on = asyncio.Event()

        async def patient(asked: DecodeRequest) -> AsyncIterator[TokenChunk]:
            await go_on.wait()
            async for chunk in counting(asked):
                yield chunk

        async def go_on_when_draining(server: RunningServer) -> None:
            await until(lambda: server._calls._draining)
            go_on.set()

        service = served_decode(ScriptedDecode(patient))
        async with wire(service, policy=ServerPolicy(drain=20)) as (server, _):
            link: DecodeLink = link_to(server.address)
            answer = asyncio.create_task(collected_ids(link.generate(request("last", 300))))
            await until(lambda: server.in_flight == 1)
            released = asyncio.create_task(go_on_when_draining(server))
        await released
        assert len(await soon(answer)) == 300
        await link.aclose()

    asyncio.run(run())
