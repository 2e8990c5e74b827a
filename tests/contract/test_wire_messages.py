"""Bytes that are no message, or too large a one, or one without its core: refused by name, and the service goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import KvChunk
from baton.rpc.errors import from_rpc_error
from baton.rpc.kvreceiver import KvReceiverClient, kvreceiver_service
from baton.rpc.planner import PlannerClient, planner_service
from baton.rpc.prefill import prefill_service
from tests.contract.wire_doubles import (
    GARBAGE,
    PLAN,
    QUERY,
    TICKET,
    ScriptedDecode,
    ScriptedPlanner,
    ScriptedPrefill,
    ScriptedReceiver,
    answers,
    blocks,
    nothing,
    raw,
    served_decode,
    soon,
    wire,
)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("/baton.v1.PlannerService/Plan", "baton.v1.PlanRequest"),
        ("/baton.v1.PrefillService/Prefill", "baton.v1.PrefillRequest"),
        ("/baton.v1.KvReceiverService/Offer", "baton.v1.OfferRequest"),
    ],
)
def test_bytes_that_are_no_message_are_refused_by_its_name_and_the_service_goes_on(
    method: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        services = (
            planner_service(ScriptedPlanner(answers(PLAN))),
            prefill_service(ScriptedPrefill(blocks())),
            kvreceiver_service(ScriptedReceiver(blocks())),
        )
        async with wire(*services) as (_, peer):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await soon(raw(peer.channel, method)(GARBAGE))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            error = from_rpc_error(raised.value, "server")
            assert isinstance(error, InvalidRequest)
            assert message in error.message
            assert error.field == message
            assert await soon(PlannerClient(peer).plan(QUERY)) == PLAN

    asyncio.run(run())
    assert [vars(r)["type"] for r in caplog.records if r.getMessage() == "undecodable message"] == [message]


def test_garbage_on_a_link_is_refused_by_its_name() -> None:
    async def run() -> None:
        async def garbage() -> AsyncIterator[bytes]:
            yield GARBAGE

        async with wire(served_decode(ScriptedDecode(nothing))) as (_, peer):
            channel: Any = peer.channel
            call = channel.stream_stream("/baton.v1.DecodeService/Attach")(garbage())
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await soon(call.read())
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "baton.v1.AttachRequest" in (raised.value.details() or "")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "field"),
    [
        ("/baton.v1.PlannerService/Plan", "PlanRequest.request_id"),
        ("/baton.v1.PrefillService/Prefill", "PrefillRequest.tokens"),
        ("/baton.v1.KvReceiverService/Handshake", "HandshakeRequest.hello"),
        ("/baton.v1.KvReceiverService/Confirm", "ConfirmRequest.ticket"),
    ],
)
def test_a_message_without_its_core_is_refused_by_field(method: str, field: str) -> None:
    async def run() -> None:
        services = (
            planner_service(ScriptedPlanner(blocks())),
            prefill_service(ScriptedPrefill(blocks())),
            kvreceiver_service(ScriptedReceiver(blocks())),
        )
        async with wire(*services) as (_, peer):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await soon(raw(peer.channel, method)(b""))
            error = from_rpc_error(raised.value, "server")
            assert isinstance(error, InvalidRequest)
            assert error.field == field

    asyncio.run(run())


def test_a_message_over_64_megabytes_is_refused_and_the_service_goes_on() -> None:
    async def run() -> None:
        domain = ScriptedReceiver(answers(None))
        async with wire(kvreceiver_service(domain)) as (server, peer):
            unlimited = grpc.aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)])
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await soon(raw(unlimited, "/baton.v1.KvReceiverService/Offer")(bytes(65 * 1024 * 1024)))
            assert isinstance(from_rpc_error(raised.value, "server"), InvalidRequest)
            await unlimited.close(None)
            with pytest.raises(InvalidRequest):  # our own clients do not even send it
                await soon(KvReceiverClient(peer).offer(KvChunk(TICKET, 0, 1, bytes(65 * 1024 * 1024))))
            assert domain.script.seen == []
            await soon(KvReceiverClient(peer).offer(KvChunk(TICKET, 0, 1, bytes(8 * 1024 * 1024))))

    asyncio.run(run())


def test_a_method_that_does_not_exist_is_unimplemented() -> None:
    async def run() -> None:
        async with wire(planner_service(ScriptedPlanner(blocks()))) as (_, peer):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await soon(raw(peer.channel, "/baton.v1.PlannerService/Guess")(b""))
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(run())
