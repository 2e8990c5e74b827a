"""Offers of one ticket as one message after another, over real gRPC: each is taken by itself, the first refusal ends
the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.core.errors import BatonError, CorruptTransfer, InvalidRequest, PeerUnavailable
from baton.core.types import KvChunk
from baton.rpc.channels import open_channel
from baton.rpc.errors import from_rpc_error
from baton.rpc.kvreceiver import NAME, KvReceiverClient, kvreceiver_service
from baton.rpc.serving import Service
from baton.rpc.wire.kvtransfer import chunk_to_wire
from protos.baton.v1 import kvtransfer_pb2 as pb
from services.kvtransfer.config import ChecksumPolicy
from services.kvtransfer.handshake import FEATURES
from services.kvtransfer.tcp import TcpOutgoing
from tests.contract.wire_doubles import (
    GARBAGE,
    HELLO,
    TICKET,
    Relay,
    Script,
    ScriptedReceiver,
    answers,
    blocks,
    soon,
    until,
    wire,
)

BLOCK = 1 << 20  # two of them are a message
COUNT = 9
PIECES = tuple(memoryview(bytes([1 + index]) * BLOCK) for index in range(COUNT))
LATE = bytes(index % 2 for index in range(COUNT))
STREAM = KvChunk(TICKET, 4, COUNT, b"", pieces=PIECES, late_checksums=LATE)
METHOD = "/baton.v1.KvReceiverService/OfferAll"


def offered(script: Script) -> list[KvChunk]:
    return script.seen  # type: ignore[return-value]


def at_each(act: Callable[[int], Awaitable[None]]) -> Script:
    """``act`` is told how many offers have come."""
    script = Script()

    async def run() -> None:
        await act(len(script.seen))

    script.act = run
    return script


def test_every_message_is_an_offer_by_itself_and_they_come_in_order() -> None:
    async def run() -> None:
        script = answers(None)
        async with wire(kvreceiver_service(ScriptedReceiver(script))) as (_, peer):
            await soon(KvReceiverClient(peer).offer(STREAM))
        seen = offered(script)
        assert [(each.first_block, each.block_count) for each in seen] == [(4, 2), (6, 2), (8, 2), (10, 2), (12, 1)]
        assert b"".join(each.body for each in seen) == b"".join(PIECES)
        assert b"".join(each.late_checksums for each in seen) == LATE
        assert {each.ticket for each in seen} == {TICKET}

    asyncio.run(run())


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_refusal_amid_the_stream_ends_it_with_that_error_and_the_service_goes_on(at: int) -> None:
    async def run() -> None:
        async def act(number: int) -> None:
            if number == at:
                raise CorruptTransfer("block 9 does not match")

        script = at_each(act)
        async with wire(kvreceiver_service(ScriptedReceiver(script))) as (_, peer):
            client = KvReceiverClient(peer)
            with pytest.raises(CorruptTransfer, match="block 9 does not match"):
                await soon(client.offer(STREAM))
            assert len(script.seen) == at
            assert peer.calls == 0
            await soon(client.offer(KvChunk(TICKET, 0, 1, b"x")))

    asyncio.run(run())


def test_a_caller_that_is_cancelled_cancels_the_offer_under_way() -> None:
    async def run() -> None:
        script = blocks()
        async with wire(kvreceiver_service(ScriptedReceiver(script))) as (_, peer):
            offering = asyncio.create_task(KvReceiverClient(peer).offer(STREAM))  # type: ignore[arg-type]
            await soon(script.begun.wait())
            offering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await soon(offering)
            await soon(script.cancelled.wait())
            assert len(script.seen) == 1
            assert peer.calls == 0

    asyncio.run(run())


def test_a_message_that_cannot_be_sent_is_the_callers_mistake_and_the_service_goes_on() -> None:
    async def run() -> None:
        script = answers(None)
        async with wire(kvreceiver_service(ScriptedReceiver(script))) as (_, peer):
            client = KvReceiverClient(peer)
            first_block = 2**32 - 2  # of the second message it is no number of 32 bits
            with pytest.raises(InvalidRequest, match="OfferRequest"):
                await soon(client.offer(KvChunk(TICKET, first_block, COUNT, b"", pieces=PIECES)))
            assert peer.calls == 0
            await soon(client.offer(STREAM))
            assert [each.first_block for each in offered(script)][-5:] == [4, 6, 8, 10, 12]

    asyncio.run(run())


@pytest.mark.parametrize(("bad", "name"), [(GARBAGE, "baton.v1.OfferRequest"), (b"", "OfferRequest.ticket")])
def test_a_message_that_is_no_offer_is_refused_by_name_and_the_ones_before_were_taken(bad: bytes, name: str) -> None:
    async def run() -> None:
        script = answers(None)

        async def messages() -> AsyncIterator[bytes]:
            yield chunk_to_wire(KvChunk(TICKET, 0, 1, b"kv")).SerializeToString()
            yield bad
            yield chunk_to_wire(KvChunk(TICKET, 1, 1, b"kv")).SerializeToString()

        async with wire(kvreceiver_service(ScriptedReceiver(script))) as (_, peer):
            channel: Any = peer.channel
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await soon(channel.stream_unary(METHOD)(messages()))
            error = from_rpc_error(raised.value, "server")
            assert isinstance(error, InvalidRequest)
            assert error.field == name
            assert [each.first_block for each in offered(script)] == [0]

    asyncio.run(run())


def test_a_receiver_that_takes_no_further_message_counts_as_lost() -> None:
    async def run() -> None:
        script = blocks()
        async with wire(kvreceiver_service(ScriptedReceiver(script))) as (_, peer):
            with pytest.raises(PeerUnavailable, match=r"nothing taken within 0\.1 s"):
                await soon(KvReceiverClient(peer, limit=0.1).offer(STREAM))
            await soon(script.cancelled.wait())  # and is told so

    asyncio.run(run())


def test_a_receiver_that_takes_message_after_message_may_take_longer_than_the_limit_for_all() -> None:
    limit, messages = 2.5, 32  # of which gRPC holds up to eight or so that were not taken yet

    async def run() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def act(number: int) -> None:
            await until(lambda: loop.time() >= began + 1.3 * limit * number / messages)

        script = at_each(act)
        async with wire(kvreceiver_service(ScriptedReceiver(script))) as (_, peer):
            long = KvChunk(TICKET, 0, 2 * messages, b"", pieces=(PIECES[0],) * 2 * messages)
            await soon(KvReceiverClient(peer, limit=limit).offer(long))
        assert loop.time() > began + limit
        assert len(script.seen) == messages

    asyncio.run(run())


def test_a_receiver_whose_host_falls_silent_amid_the_stream_counts_as_lost() -> None:
    async def run() -> None:
        relays: list[Relay] = []

        async def act(number: int) -> None:
            if number == 2:
                relays[0].freeze()

        script = at_each(act)
        async with wire(kvreceiver_service(ScriptedReceiver(script))) as (server, _), Relay(server) as relay:
            relays.append(relay)
            channel = open_channel(relay.address)
            with pytest.raises(PeerUnavailable):
                await soon(KvReceiverClient(channel, limit=0.5).offer(STREAM))
            await channel.close()
        assert 2 <= len(script.seen) < 5

    asyncio.run(run())


def of_an_older_version(payloads: list[bytes]) -> Service:
    """Has ``Offer`` alone, read and answered as bytes."""

    async def offer(request: bytes, context: object) -> bytes:
        payloads.append(pb.OfferRequest.FromString(request).payload)
        return b""

    untyped: Any = grpc
    handler = untyped.method_handlers_generic_handler(NAME, {"Offer": untyped.unary_unary_rpc_method_handler(offer)})
    return Service(NAME, lambda server, _: server.add_generic_rpc_handlers((handler,)), counted=False)


def test_a_receiver_of_an_older_version_is_offered_all_in_one_message() -> None:
    async def run() -> None:
        payloads: list[bytes] = []
        async with wire(of_an_older_version(payloads)) as (_, peer):
            client = KvReceiverClient(peer)
            old = TcpOutgoing(HELLO.format, ChecksumPolicy.FULL).receiver(HELLO, client)
            await soon(old.offer(STREAM))  # type: ignore[arg-type]
            assert payloads == [b"".join(PIECES)]
            await soon(old.offer(KvChunk(TICKET, 0, 1, b"kv")))  # type: ignore[arg-type]
            assert payloads[1:] == [b"kv"]
            new = TcpOutgoing(HELLO.format, ChecksumPolicy.FULL).receiver(replace(HELLO, features=FEATURES), client)
            with pytest.raises(BatonError, match="Method not found"):
                await soon(new.offer(STREAM))  # type: ignore[arg-type]

    asyncio.run(run())


def test_a_receiver_that_is_not_there_is_unavailable() -> None:
    async def run() -> None:
        async with wire(kvreceiver_service(ScriptedReceiver(blocks()))) as (server, _):
            address = server.address
        gone = open_channel(address)
        with pytest.raises(PeerUnavailable, match=address):
            await soon(KvReceiverClient(gone).offer(STREAM))
        await gone.close()

    asyncio.run(run())
