from __future__ import annotations

import asyncio
import inspect
import subprocess
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.client import Answer, ChatMessage, Client, ClientTls, GenerateRequest, ResumePolicy, SyncClient
from baton.client.answer import collect
from baton.client.resume import HeldAnswer
from baton.core.clock import ManualClock
from baton.core.errors import Expired, InvalidRequest, Overloaded, PeerUnavailable, Unauthenticated
from baton.core.telemetry import SilentMeter
from baton.core.types import FinishReason, GenerateChunk
from baton.rpc.serving import serve
from gateway.config import GatewayConfig
from gateway.doors.native import native_door
from tests.unit.client.doors import ASK, PATIENT, door, eventually
from tests.unit.gateway.doubles import MODEL, Fault, Fleet, ScriptedDecode


def test_streams_completes_chats_and_counts() -> None:
    fleet = Fleet(ScriptedDecode("a"))

    async def run() -> None:
        async with door(fleet) as server, Client(server.address, fleet.key) as client:
            streamed = [c async for c in client.generate(prompt_token_ids=[7], max_tokens=5, seed=5)]
            whole = await client.complete(prompt_token_ids=[7], max_tokens=5, seed=5)
            assert whole.choices[0].token_ids == tuple(t for c in streamed for t in c.token_ids)
            assert whole.text == "".join(c.text for c in streamed)
            assert whole.choices[0].finish is FinishReason.LENGTH
            assert whole.choices[0].usage.completion_tokens == 5
            chat = await client.complete_chat(
                [ChatMessage("user", "hi")], max_tokens=2, n=2, temperature=1.0, ignore_eos=True
            )
            assert [len(choice.token_ids) for choice in chat.choices] == [2, 2]
            assert len(await client.count_tokens(text="abc")) == 3
            assert [info.model for info in await client.models()] == [MODEL]
            assert (await client.model()).model == MODEL

    asyncio.run(run())
    fleet.assert_idle()


def test_options_reach_the_worker() -> None:
    worker = ScriptedDecode("a")
    fleet = Fleet(worker)

    async def run() -> None:
        async with door(fleet) as server, Client(server.address, fleet.key) as client:
            await client.complete(
                text="abc",
                max_tokens=3,
                min_tokens=1,
                stop_token_ids=[9],
                ignore_eos=True,
                temperature=0.5,
                top_k=3,
                top_p=0.5,
                min_p=0.25,
                repetition_penalty=1.5,
                presence_penalty=0.5,
                frequency_penalty=0.25,
                logit_bias={4: 1.5},
                seed=11,
                logprobs=2,
                request_id="mine",
                timeout=20,
            )

    asyncio.run(run())
    [sent] = worker.requests
    sampling, stop = sent.tokens.sampling, sent.tokens.stop
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.5, 0.25)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5, 0.25)
    assert (sampling.logit_bias, sampling.seed) == (((4, 1.5),), 11)
    assert (stop.max_tokens, stop.min_tokens, stop.stop_token_ids, stop.ignore_eos) == (3, 1, (9,), True)
    assert (sent.tokens.logprobs, sent.tokens.request_id) == (2, "mine")
    assert sent.tokens.timeout is not None


def test_errors_are_typed() -> None:
    fleet = Fleet(ScriptedDecode("a", [Fault(0, Overloaded("full", retry_after=7.0))]))

    async def run() -> None:
        async with door(fleet) as server, Client(server.address, fleet.key) as client:
            with pytest.raises(InvalidRequest, match="max_tokens"):
                await client.complete(text="x", max_tokens=0)
            with pytest.raises(Overloaded) as caught:
                await client.ask(ASK)
            assert caught.value.retry_after == 7.0
            async with Client(server.address, "local.wrong") as stranger:
                with pytest.raises(Unauthenticated):
                    await stranger.models()

    asyncio.run(run())


def test_leaving_the_loop_cancels_the_request() -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = 4
    fleet = Fleet(worker)

    async def run() -> None:
        async with door(fleet) as server, Client(server.address, fleet.key) as client:
            async with aclosing(client.stream(ASK)) as chunks:
                async for _ in chunks:
                    break
            await eventually(lambda: worker.open == 0)

    asyncio.run(run())
    fleet.assert_idle()


def test_the_deadline_covers_the_whole_answer() -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = 1
    fleet = Fleet(worker)

    async def run() -> None:
        async with door(fleet) as server, Client(server.address, fleet.key) as client:
            with pytest.raises(Expired):
                await client.ask(replace(ASK, timeout=0.3))

    asyncio.run(run())


def test_a_gateway_that_is_not_there_is_a_typed_error_after_few_tries() -> None:
    async def run() -> None:
        async with Client("127.0.0.1:1", "k.s", clock=ManualClock()) as client:
            with pytest.raises(PeerUnavailable):
                await client.ask(ASK)

    asyncio.run(run())


def test_a_stream_that_ends_early_without_an_error_is_continued_and_given_up_at_last() -> None:
    class Door:
        """Ends each stream after one token, then without any."""

        def __init__(self) -> None:
            self.asked: list[GenerateRequest] = []

        async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
            self.asked.append(request)
            if len(self.asked) <= 3:
                yield GenerateChunk(request.request_id, token_ids=(len(self.asked),))

    async def run() -> Door:
        door = Door()
        async with Client("nowhere:1", "k.s", resume=ResumePolicy(attempts=2), clock=ManualClock()) as client:
            client._door = lambda _: door  # type: ignore[method-assign, assignment, return-value]
            with pytest.raises(PeerUnavailable, match="before the answer was complete"):
                await client.ask(ASK)
        return door

    asked = asyncio.run(run()).asked
    assert [request.resume for request in asked] == [(), ((1,),), ((1, 2),), ((1, 2, 3),), ((1, 2, 3),)]
    assert len({request.request_id for request in asked}) == 1


def test_streams_that_are_lost_together_go_on_at_the_next_address_together() -> None:
    """An even number of them would be back at the first one if each turned by itself."""

    began: list[str] = []
    all_began = asyncio.Event()

    class Door:
        def __init__(self, address: str) -> None:
            self.address = address

        async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
            if self.address == "alive:1":
                yield GenerateChunk(request.request_id, token_ids=(2,), finish=FinishReason.STOP)
                return
            yield GenerateChunk(request.request_id, token_ids=(1,))
            began.append(request.request_id)
            if len(began) == 4:
                all_began.set()
            await all_began.wait()
            raise PeerUnavailable("lost")

    async def run() -> list[Answer]:
        addresses, policy = ["dead:1", "alive:1"], ResumePolicy(attempts=1)
        async with Client(addresses, "k.s", resume=policy, clock=ManualClock()) as client:
            client._door = Door  # type: ignore[method-assign, assignment]
            return await asyncio.gather(*(client.ask(replace(ASK, request_id=f"r{n}")) for n in range(4)))

    answers = asyncio.run(run())
    assert [list(answer.choices[0].token_ids) for answer in answers] == [[1, 2]] * 4


@pytest.mark.parametrize("n", [1, 3])
def test_an_answer_survives_the_death_of_its_gateway(n: int) -> None:
    """The first gateway stops mid-stream; another one, over other workers, takes over at the same address."""
    request = replace(ASK, n=n)
    alone = asyncio.run(collect_from(Fleet(ScriptedDecode("x")), request))
    worker = ScriptedDecode("a")
    worker.hang_after = 3
    first, second = Fleet(worker), Fleet(ScriptedDecode("b"))
    second.callers = first.callers

    async def run() -> Answer:
        async with door(first, drain=0.0) as server:
            address = server.address
            client = await stack_enter(Client(address, first.key, resume=PATIENT))
            chunks = client.stream(request)
            got = [await anext(chunks)]
            rest = asyncio.create_task(read(chunks))
            await eventually(lambda: worker.open == n and worker.sent >= 3 * n)
        async with door(second, address):
            got += await rest
        await client.__aexit__(None, None, None)
        return await collect(replay(got), n)

    answer = asyncio.run(run())
    for mine, wanted in zip(answer.choices, alone.choices, strict=True):
        assert (mine.token_ids, mine.text, mine.logprobs) == (wanted.token_ids, wanted.text, wanted.logprobs)
        assert mine.finish == wanted.finish
        assert mine.usage == wanted.usage
    second.assert_idle()


async def stack_enter(client: Client) -> Client:
    return await client.__aenter__()


async def read(chunks: AsyncIterator[GenerateChunk]) -> list[GenerateChunk]:
    return [chunk async for chunk in chunks]


async def replay(chunks: list[GenerateChunk]) -> AsyncIterator[GenerateChunk]:
    for chunk in chunks:
        yield chunk


async def collect_from(fleet: Fleet, request: GenerateRequest) -> Answer:
    return await collect(fleet.gateway.generate(request, fleet.caller), request.n)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 3), step=st.integers(1, 5))
def test_cut_anywhere_any_number_of_times_the_held_answer_is_the_same(data: st.DataObject, n: int, step: int) -> None:
    """Without a wire: every call is cut after a drawn number of chunks and the rest asked for."""
    request = replace(ASK, n=n, request_id="r", stop_strings=("q",))

    async def run() -> tuple[Answer, Answer]:
        fleet = Fleet(ScriptedDecode("a", step=step))
        whole = await collect_from(fleet, request)
        held, got = HeldAnswer(request), list[GenerateChunk]()
        while not held.complete:
            taken = 0
            limit = data.draw(st.integers(1, 40))
            async with aclosing(fleet.gateway.generate(held.rest(None), fleet.caller)) as chunks:  # type: ignore[type-var]
                async for received in chunks:
                    chunk = held.take(received)
                    if chunk is not None:
                        got.append(chunk)
                        taken += 1
                    if taken >= limit:
                        break
        return whole, await collect(replay(got), n)

    whole, joined = asyncio.run(run())
    for mine, wanted in zip(joined.choices, whole.choices, strict=True):
        assert (mine.token_ids, mine.text, mine.logprobs) == (wanted.token_ids, wanted.text, wanted.logprobs)
        assert (mine.finish, mine.usage) == (wanted.finish, wanted.usage)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed pair for 127.0.0.1, made by the openssl command."""
    folder = tmp_path_factory.mktemp("door")
    form = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -keyout door.key -out door.pem"
    subject = ["-subj", "/CN=door", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *form.split(), *subject], cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


def test_a_door_with_a_certificate_is_reached_over_tls_only(certificate: Path) -> None:
    fleet = Fleet(ScriptedDecode("a"))
    config = GatewayConfig(door_certificate=str(certificate / "door.pem"), door_key=str(certificate / "door.key"))
    service = native_door(fleet.gateway, fleet.callers, stall_seconds=20)

    async def run() -> None:
        async with serve([service], "127.0.0.1:0", SilentMeter(), config.server_policy()) as server:
            tls = ClientTls(certificate / "door.pem")
            async with Client(server.address, fleet.key, tls) as client:
                assert (await client.ask(ASK)).choices[0].token_ids
            async with Client(server.address, fleet.key) as client:
                with pytest.raises(PeerUnavailable):
                    await client.ask(ASK)

    asyncio.run(run())


def test_the_sync_client_streams_completes_and_cancels() -> None:
    worker = ScriptedDecode("a")
    fleet = Fleet(worker)

    def talk(address: str) -> None:
        with SyncClient(address, fleet.key) as client:
            answer = client.complete(prompt_token_ids=[7], max_tokens=5, seed=5)
            streamed = [t for c in client.generate(prompt_token_ids=[7], max_tokens=5, seed=5) for t in c.token_ids]
            assert tuple(streamed) == answer.choices[0].token_ids
            assert client.complete_chat([ChatMessage("user", "hi")], max_tokens=2).choices[0].token_ids
            assert [info.model for info in client.models(timeout=20)] == [MODEL]
            assert client.model(timeout=20).model == MODEL
            assert len(client.count_tokens(text="abc", timeout=20)) == 3
            assert client.ask(ASK).choices[0].token_ids
            with pytest.raises(InvalidRequest):
                client.complete(text="x", max_tokens=0)
            worker.hang_after = 2
            stream = client.stream(ASK)
            next(stream)
            stream.close()

    async def run() -> None:
        async with door(fleet) as server:
            await asyncio.to_thread(talk, server.address)
            await eventually(lambda: worker.open == 0)

    asyncio.run(run())
    fleet.assert_idle()


def test_the_sync_client_offers_what_the_asyncio_one_does() -> None:
    def offered(kind: type) -> dict[str, list[str]]:
        public = {name: found for name, found in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}
        return {name: list(inspect.signature(found).parameters) for name, found in public.items()}

    assert offered(SyncClient) == offered(Client)
