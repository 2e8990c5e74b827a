"""What a gateway may rely on from DecodeApi, whether the worker is an object or a process at the end of a link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import pytest
import uvloop

from baton.core.errors import BatonError, Cancelled, Expired, Overloaded, PeerUnavailable
from baton.core.telemetry import SilentMeter
from baton.core.types import (
    Attempt,
    Candidate,
    DecodeRequest,
    FinishReason,
    Placement,
    PrefillMode,
    Sampling,
    StopRules,
    TokenChunk,
    TokenLogprob,
    Usage,
)
from baton.rpc import decode_service
from baton.rpc.decode_link import DecodeLink
from baton.rpc.link import EnginePulse
from baton.rpc.serving import RunningServer, ServerPolicy, serve
from protos.baton.v1 import decode_pb2 as pb
from protos.baton.v1 import decode_pb2_grpc
from tests.contract.test_wire_errors import ALL_ERRORS, same_error
from tests.contract.wire_doubles import (
    PATIENT,
    TOKENS,
    WAYS,
    Relay,
    ScriptedDecode,
    decode,
    link_to,
    served_decode,
    soon,
    until,
    wire,
)

REQUEST = DecodeRequest(TOKENS)
HANGS_SOON = replace(PATIENT, stall=0.3)


def request(name: str, max_tokens: int = 16, timeout: float | None = None) -> DecodeRequest:
    tokens = replace(TOKENS, request_id=name, stop=StopRules(max_tokens=max_tokens), timeout=timeout)
    return DecodeRequest(tokens)


async def counting(asked: DecodeRequest) -> AsyncIterator[TokenChunk]:
    for index in range(asked.tokens.stop.max_tokens):
        yield TokenChunk(token_ids=(index,))
        await asyncio.sleep(0)


async def endless(asked: DecodeRequest) -> AsyncIterator[TokenChunk]:
    """One token, then nothing until it is cancelled."""
    yield TokenChunk(token_ids=(1,))
    await asyncio.Event().wait()


async def silent(asked: DecodeRequest) -> AsyncIterator[TokenChunk]:
    await asyncio.Event().wait()
    yield TokenChunk()


async def collected(stream: AsyncIterator[TokenChunk]) -> list[TokenChunk]:
    return [chunk async for chunk in stream]


@pytest.mark.parametrize("way", WAYS)
def test_every_field_of_request_and_answer_arrives(way: str) -> None:
    asked = DecodeRequest(
        replace(
            TOKENS,
            attempt=Attempt(2, 1),
            generated=(4, 5),
            sampling=Sampling(temperature=0.7, top_k=3, logit_bias=((1, -2.5),), seed=2**62),
            stop=StopRules(9, 2, (7,), ignore_eos=True),
            logprobs=2,
            prompt_logprobs=0,
            priority=-3,
            tenant="acme",
            salt=b"\x00\xff",
        ),
        prefill=(Candidate("prefill-0", "127.0.0.1:9", 2**64 - 1),),
        local_prefill_max_tokens=128,
    )
    chunks = [
        TokenChunk(
            token_ids=(6, 7),
            logprobs=(TokenLogprob(6, -0.5, ((6, -0.5), (1, -1.25))),),
            prompt_logprobs=(None, TokenLogprob(2, -3.5)),
            usage=Usage(3, 2, 1),
            placement=Placement("decode-0", "prefill-0", PrefillMode.REMOTE, 4096),
        ),
        TokenChunk(token_ids=(8,)),
        TokenChunk(finish=FinishReason.STOP, usage=Usage(3, 2, 3)),
    ]

    async def answer(_: DecodeRequest) -> AsyncIterator[TokenChunk]:
        for chunk in chunks:
            yield chunk

    async def run() -> None:
        domain = ScriptedDecode(answer)
        async with decode(way, domain) as worker:
            assert await soon(collected(worker.generate(asked))) == chunks
        assert domain.seen == [asked]

    asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
def test_many_requests_at_once_are_not_mixed_up(way: str) -> None:
    async def run() -> None:
        async with decode(way, ScriptedDecode(counting)) as worker:
            sizes = [1 + 7 * index % 40 for index in range(64)]
            streams = [collected(worker.generate(request(f"req-{n}", size))) for n, size in enumerate(sizes)]
            answers = await soon(asyncio.gather(*streams))
        for size, answer in zip(sizes, answers, strict=True):
            assert [chunk.token_ids for chunk in answer] == [(index,) for index in range(size)]

    asyncio.run(run())


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("way", WAYS)
def test_a_typed_error_arrives_intact_after_the_chunks_before_it(way: str, error: BatonError) -> None:
    async def failing(_: DecodeRequest) -> AsyncIterator[TokenChunk]:
        yield TokenChunk(token_ids=(1,))
        raise error

    async def run() -> None:
        got: list[TokenChunk] = []
        async with decode(way, ScriptedDecode(failing)) as worker:
            with pytest.raises(BatonError) as raised:
                async for chunk in worker.generate(REQUEST):
                    got.append(chunk)
        same_error(raised.value, error)
        assert got == [TokenChunk(token_ids=(1,))]

    asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
def test_closing_the_stream_frees_the_request(way: str) -> None:
    async def run() -> None:
        domain = ScriptedDecode(endless)
        async with decode(way, domain) as worker:
            async with aclosing(worker.generate(REQUEST)) as stream:  # type: ignore[type-var]
                await soon(anext(stream))
                assert domain.running == {"req-1"}
            await until(lambda: not domain.running)
            assert domain.cancelled == ["req-1"]

    asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
def test_cancelling_frees_a_request_that_was_never_answered(way: str) -> None:
    async def run() -> None:
        domain = ScriptedDecode(silent)
        async with decode(way, domain) as worker:
            task = asyncio.create_task(collected(worker.generate(REQUEST)))
            await until(lambda: bool(domain.running))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not domain.running)

    asyncio.run(run())


# --- what only a link can do ------------------------------------------------------------------------------------------


def test_a_bug_in_the_worker_ends_its_request_only() -> None:
    async def buggy(asked: DecodeRequest) -> AsyncIterator[TokenChunk]:
        if asked.tokens.request_id == "bad":
            raise ZeroDivisionError("secret")
        async for chunk in counting(asked):
            yield chunk

    async def run() -> None:
        async with decode("wire", ScriptedDecode(buggy)) as worker:
            good = asyncio.create_task(collected(worker.generate(request("good", 50))))
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
            answers = await soon(asyncio.gather(*(collected(worker.generate(request(f"r{n}"))) for n in range(8))))
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

        async def engine(domain: ScriptedDecode, tasks: list[asyncio.Task[list[TokenChunk]]]) -> None:
            await until(lambda: len(domain.running) == len(tasks))
            while domain.running:
                async with step:
                    step.notify_all()
                await asyncio.sleep(0.005)

        domain = ScriptedDecode(stepping)
        async with decode("wire", domain) as worker:
            tasks = [asyncio.create_task(collected(worker.generate(request(f"req-{n}")))) for n in range(32)]
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
        domain = ScriptedDecode(endless)
        policy = replace(PATIENT, silence=1.0, gateway_silence=1.0)
        async with wire(served_decode(domain, policy)) as (server, _), link_to(server.address, policy) as link:
            stream = aiter(link.generate(REQUEST))
            await soon(anext(stream))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 2.5)

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
        domain = ScriptedDecode(endless)
        service = served_decode(domain, HANGS_SOON, pulse=lambda: EnginePulse(step=7, unfinished=0))
        async with wire(service) as (server, _), link_to(server.address, HANGS_SOON) as link:
            stream = aiter(link.generate(REQUEST))
            await soon(anext(stream))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 3 * HANGS_SOON.stall)

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
            assert len(await soon(collected(link.generate(REQUEST)))) == 16

    asyncio.run(run())


def test_a_restarted_worker_is_refused_by_its_epoch() -> None:
    async def run() -> None:
        domain = ScriptedDecode(counting)
        async with wire(served_decode(domain, epoch=5)) as (server, _), link_to(server.address, epoch=4) as link:
            with pytest.raises(PeerUnavailable, match="restarted"):
                await soon(collected(link.generate(REQUEST)))
        assert domain.seen == []

    asyncio.run(run())


def test_a_second_stream_of_a_session_cancels_the_first_ones_requests() -> None:
    async def run() -> None:
        order: list[str] = []

        async def slow_to_leave(asked: DecodeRequest) -> AsyncIterator[TokenChunk]:
            name = asked.tokens.request_id
            order.append(f"{name} begins")
            try:
                yield TokenChunk(token_ids=(1,))
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.1)
                order.append(f"{name} ended")

        async def messages(name: str) -> AsyncIterator[pb.AttachRequest]:
            yield pb.AttachRequest(hello=pb.LinkHello(session_id="same", gateway_id="g", protocol_version=1))
            tokens = {"request_id": name, "prompt": [1]}
            yield pb.AttachRequest(open=pb.OpenRequest(stream=1, tokens=tokens))
            while True:
                await asyncio.sleep(0.1)
                yield pb.AttachRequest(heartbeat=pb.LinkHeartbeat())

        async with wire(served_decode(ScriptedDecode(slow_to_leave))) as (_, channel):
            stub = decode_pb2_grpc.DecodeServiceStub(channel.channel)
            first = stub.Attach(messages("old"))
            await until(lambda: order == ["old begins"])
            second = stub.Attach(messages("new"))
            await until(lambda: len(order) == 3)
            assert order == ["old begins", "old ended", "new begins"]
            first.cancel()
            second.cancel()

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
            awake = asyncio.create_task(collected(link.generate(request("awake", 2000))))
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
            await soon(anext(stream))
            await until(lambda: server.in_flight == 0)
            assert len(await soon(collected(stream))) == 49

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
            answer = asyncio.create_task(collected(link.generate(request("last", 300))))
            await until(lambda: server.in_flight == 1)
            released = asyncio.create_task(go_on_when_draining(server))
        await released
        assert len(await soon(answer)) == 300
        await link.aclose()

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
