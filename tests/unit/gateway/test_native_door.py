from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from baton.core.errors import BatonError, Expired, InvalidRequest, Unauthenticated, UnknownModel
from baton.core.streams import closing
from baton.core.telemetry import SilentMeter
from baton.core.types import ChatMessage, GenerateRequest
from baton.rpc.channels import ClientSecurity, PeerChannel, open_channel
from baton.rpc.gateway import GatewayClient
from baton.rpc.serving import RunningServer, ServerPolicy, serve
from gateway.doors.native import native_door
from protos.baton.v1 import gateway_pb2 as pb
from protos.baton.v1 import gateway_pb2_grpc
from tests.unit.gateway.doubles import CONTEXT, MODEL, Fleet, ScriptedDecode, answer

ASK = GenerateRequest(model=MODEL, prompt_token_ids=(7,), max_tokens=24, seed=5, logprobs=0)


@asynccontextmanager
async def door(fleet: Fleet, stall: float = 20.0) -> AsyncIterator[RunningServer]:
    service = native_door(fleet.gateway, fleet.callers, stall_seconds=stall)
    async with serve([service], "127.0.0.1:0", SilentMeter(), ServerPolicy(drain=5.0)) as server:
        yield server


@asynccontextmanager
async def channel(server: RunningServer, key: str) -> AsyncIterator[PeerChannel]:
    opened = open_channel(server.address, ClientSecurity(token=key))
    try:
        yield opened
    finally:
        await opened.close()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def test_an_answer_crosses_the_wire_unchanged() -> None:
    fleet = Fleet(ScriptedDecode("a"))

    async def run() -> None:
        direct = await fleet.ask(replace(ASK, n=2, request_id="r"))
        async with door(fleet) as server, channel(server, fleet.key) as opened:
            sent = [chunk async for chunk in GatewayClient(opened).generate(replace(ASK, n=2, request_id="s"))]
        for index in range(2):
            assert answer(sent, index) == answer(direct, index)
        assert {chunk.request_id for chunk in sent} == {"s"}

    asyncio.run(run())
    fleet.assert_idle()


def test_chat_counts_and_models_answer() -> None:
    fleet = Fleet(ScriptedDecode("a"))
    messages = (ChatMessage("user", "hi"),)

    async def run() -> None:
        async with door(fleet) as server, channel(server, fleet.key) as opened:
            client = GatewayClient(opened)
            chunks = [chunk async for chunk in client.generate(GenerateRequest(messages=messages, max_tokens=3))]
            assert len(answer(chunks).ids) == 3
            assert len(await client.count_tokens(GenerateRequest(messages=messages))) == len("[user]hi")
            [info] = await client.list_models()
            assert (info.model, info.context_length) == (MODEL, CONTEXT)
            assert await client.get_model(MODEL) == info
            with pytest.raises(UnknownModel):
                await client.get_model("nope")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (replace(ASK, model="nope"), UnknownModel, ""),
        (replace(ASK, max_tokens=0), InvalidRequest, "max_tokens"),
        (replace(ASK, max_tokens=CONTEXT), InvalidRequest, "max_tokens"),
        (replace(ASK, prompt_token_ids=None), InvalidRequest, "prompt"),
        (GenerateRequest(text="x" * 10_000_000), InvalidRequest, "text"),
        (GenerateRequest(messages=(ChatMessage("robot", "x"),)), InvalidRequest, "messages[0].role"),
    ],
)
def test_bad_input_arrives_as_the_typed_error_that_names_it(
    request_: GenerateRequest, error: type[BatonError], field: str
) -> None:
    fleet = Fleet(ScriptedDecode("a"))

    async def run() -> None:
        async with door(fleet) as server, channel(server, fleet.key) as opened:
            client = GatewayClient(opened)
            with pytest.raises(error) as caught:
                [chunk async for chunk in client.generate(request_)]
            assert getattr(caught.value, "field", "") == field
            assert [chunk async for chunk in client.generate(ASK)]

    asyncio.run(run())


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer local.wrong"),),
        (("authorization", "Basic {key}"),),
        (("x-api-key", "wrong"),),
    ],
)
def test_a_call_without_a_valid_key_is_refused(metadata: tuple[tuple[str, str], ...]) -> None:
    fleet = Fleet(ScriptedDecode("a"))

    async def run() -> None:
        async with door(fleet) as server, channel(server, "") as opened:
            stub = gateway_pb2_grpc.GatewayServiceStub(opened.channel)
            given = grpc.aio.Metadata(*((name, value.format(key=fleet.key)) for name, value in metadata))
            with pytest.raises(Unauthenticated):
                await opened.answer(stub.ListModels(pb.ListModelsRequest(), metadata=given))

    asyncio.run(run())


@pytest.mark.parametrize(("name", "form"), [("authorization", "bearer {}"), ("x-api-key", "{}")])
def test_both_ways_to_show_a_key_are_taken(name: str, form: str) -> None:
    fleet = Fleet(ScriptedDecode("a"))

    async def run() -> None:
        async with door(fleet) as server, channel(server, "") as opened:
            stub = gateway_pb2_grpc.GatewayServiceStub(opened.channel)
            metadata = grpc.aio.Metadata((name, form.format(fleet.key)))
            models = await opened.answer(stub.ListModels(pb.ListModelsRequest(), metadata=metadata))
            assert [model.model for model in models.models] == [MODEL]

    asyncio.run(run())


def test_the_calls_deadline_is_the_requests() -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = 2
    fleet = Fleet(worker)

    async def run() -> None:
        async with door(fleet) as server, channel(server, fleet.key) as opened:
            with pytest.raises(Expired):
                [chunk async for chunk in GatewayClient(opened).generate(replace(ASK, timeout=0.3))]
            await eventually(lambda: worker.open == 0)
            timeout = worker.requests[0].tokens.timeout
            assert timeout is not None
            assert 0 < timeout < 1  # 0.3 s and what the wire rounds up

    asyncio.run(run())
    fleet.assert_idle()


@pytest.mark.parametrize("after", [0, 3])
def test_an_abandoned_stream_frees_everything(after: int) -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = after
    fleet = Fleet(worker)

    async def run() -> None:
        async with door(fleet) as server, channel(server, fleet.key) as opened:
            async with closing(GatewayClient(opened).generate(ASK)) as chunks:
                for _ in range(after):
                    await anext(chunks)
                if not after:
                    reading = asyncio.ensure_future(anext(chunks))
                    await eventually(lambda: worker.open == 1)
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
            await eventually(lambda: worker.open == 0 and server.in_flight == 0)

    asyncio.run(run())
    fleet.assert_idle()


def test_a_client_that_vanishes_frees_everything() -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = 3
    fleet = Fleet(worker)

    async def run() -> None:
        async with door(fleet) as server:
            async with channel(server, fleet.key) as opened:
                chunks = GatewayClient(opened).generate(ASK)
                await anext(chunks)
            await eventually(lambda: worker.open == 0 and server.in_flight == 0)
            await chunks.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    fleet.assert_idle()


def test_a_client_that_reads_nothing_is_cancelled_and_others_are_not() -> None:
    """The large log-probabilities fill every buffer between worker and client, so that writing has to wait."""
    worker = ScriptedDecode("a", drawn=lambda seed, context: 1)
    fleet = Fleet(worker)
    greedy = replace(ASK, max_tokens=500, n=16)

    async def run() -> None:
        async with door(fleet, stall=0.3) as server, channel(server, fleet.key) as opened:
            stalled = GatewayClient(opened).generate(greedy)
            await anext(stalled)
            async with channel(server, fleet.key) as other:
                assert [chunk async for chunk in GatewayClient(other).generate(ASK)]
            await eventually(lambda: worker.open == 0 and fleet.gateway.running == 0)
            assert worker.sent < 16 * 500
            await stalled.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    fleet.assert_idle()


def test_a_drain_lets_running_streams_end_and_refuses_new_ones() -> None:
    worker = ScriptedDecode("a")
    fleet = Fleet(worker)

    async def run() -> None:
        async with door(fleet) as server, channel(server, fleet.key) as opened:
            chunks = GatewayClient(opened).generate(ASK)
            first = await anext(chunks)
            draining = asyncio.create_task(server.drain(30))
            await asyncio.sleep(0)
            with pytest.raises(BatonError, match="draining"):
                [chunk async for chunk in GatewayClient(opened).generate(ASK)]
            rest = [chunk async for chunk in chunks]
            assert answer([first, *rest]).finish is not None
            assert await draining

    asyncio.run(run())
    fleet.assert_idle()


def test_bytes_that_are_no_message_are_an_invalid_request() -> None:
    fleet = Fleet(ScriptedDecode("a"))

    async def run() -> None:
        async with door(fleet) as server, channel(server, fleet.key) as opened:
            call = opened.channel.unary_unary("/baton.v1.GatewayService/GetModel", bytes, bytes)
            with pytest.raises(InvalidRequest, match="GetModelRequest"):
                await opened.answer(call(b"\xff\xff\xff", metadata=opened.metadata()))

    asyncio.run(run())
