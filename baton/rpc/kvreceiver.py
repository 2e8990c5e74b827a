"""KvReceiverApi over gRPC: the receiving end of a hand-over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any, Final

import grpc
import grpc.aio

from baton.core.api import KvReceiverApi
from baton.core.errors import InvalidRequest, PeerUnavailable
from baton.core.streams import closing
from baton.core.types import KvChunk, KvConfirmation, KvHandshake
from baton.rpc.calls import Calls
from baton.rpc.channels import PeerChannel
from baton.rpc.serving import Service
from baton.rpc.wire.guard import require
from baton.rpc.wire.kvtransfer import chunk_from_wire, chunk_to_wire, confirmation_from_wire, confirmation_to_wire
from baton.rpc.wire.offer import Offer
from baton.rpc.wire.types import handshake_from_wire, handshake_to_wire
from protos.baton.v1 import kvtransfer_pb2 as pb
from protos.baton.v1 import kvtransfer_pb2_grpc

NAME: Final = "baton.v1.KvReceiverService"

_grpc: Any = grpc  # the stubs leave parts of it untyped


class _Servicer:
    def __init__(self, receiver: KvReceiverApi) -> None:
        self._receiver = receiver

    async def Handshake(
        self, request: pb.HandshakeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.HandshakeResponse:
        require(request, "hello")
        answer = await self._receiver.handshake(handshake_from_wire(request.hello))
        return pb.HandshakeResponse(hello=handshake_to_wire(answer))

    async def Offer(self, request: Offer, context: grpc.aio.ServicerContext[Any, Any]) -> pb.OfferResponse:
        await self._receiver.offer(chunk_from_wire(request))
        return pb.OfferResponse()

    async def OfferAll(
        self, requests: AsyncIterator[Offer], context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.OfferAllResponse:
        async with closing(requests):
            async for request in requests:
                await self._receiver.offer(chunk_from_wire(request))
        return pb.OfferAllResponse()

    async def Confirm(
        self, request: pb.ConfirmRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ConfirmResponse:
        await self._receiver.confirm(confirmation_from_wire(request))
        return pb.ConfirmResponse()


def _handlers(servicer: _Servicer) -> dict[str, Any]:
    """As the generated code has them, but for the offer, whose payload is not to go through protobuf."""
    methods = (
        (servicer.Handshake, pb.HandshakeRequest, pb.HandshakeResponse),
        (servicer.Offer, Offer, pb.OfferResponse),
        (servicer.Confirm, pb.ConfirmRequest, pb.ConfirmResponse),
    )
    handlers = {
        method.__name__: _grpc.unary_unary_rpc_method_handler(
            method, request_deserializer=request.FromString, response_serializer=response.SerializeToString
        )
        for method, request, response in methods
    }
    all_of_them = _grpc.stream_unary_rpc_method_handler(
        servicer.OfferAll,
        request_deserializer=Offer.FromString,
        response_serializer=pb.OfferAllResponse.SerializeToString,
    )
    return handlers | {"OfferAll": all_of_them}


def kvreceiver_service(receiver: KvReceiverApi) -> Service:
    """Not counted: what it receives belongs to requests that run already, and a drain waits for those."""

    def mount(server: Any, calls: Calls) -> None:
        server.add_generic_rpc_handlers((_grpc.method_handlers_generic_handler(NAME, _handlers(_Servicer(receiver))),))

    return Service(NAME, mount, counted=False)


class KvReceiverClient(KvReceiverApi):
    """``limit``: seconds after which a receiver that does not answer counts as lost, or takes no further message of a
    stream. A confirmation with checksums may have to wait there for copies, of which only its caller knows when they
    are done: it has no limit here."""

    def __init__(self, channel: PeerChannel, limit: float = 10.0) -> None:
        self._channel = channel
        self._limit = limit
        self._stub = kvtransfer_pb2_grpc.KvReceiverServiceStub(channel.channel)
        untyped: Any = channel.channel  # the stubs know generated messages only
        self._offer = untyped.unary_unary(
            f"/{NAME}/Offer",
            request_serializer=Offer.SerializeToString,
            response_deserializer=pb.OfferResponse.FromString,
        )
        self._offer_all = untyped.stream_unary(
            f"/{NAME}/OfferAll",
            request_serializer=Offer.SerializeToString,
            response_deserializer=pb.OfferAllResponse.FromString,
        )

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        message = pb.HandshakeRequest(hello=handshake_to_wire(hello))
        call = self._stub.Handshake(message, timeout=self._limit, metadata=self._channel.metadata())
        answer = await self._channel.answer_soon(call, self._limit)
        try:
            require(answer, "hello")
            return handshake_from_wire(answer.hello)
        except InvalidRequest as error:
            raise self._channel.incomplete(error) from error

    async def offer(self, chunk: KvChunk) -> None:
        metadata = self._channel.metadata(chunk.ticket.request_id)
        if chunk.part_count() > 1:
            call: Awaitable[object] = self._streamed(self._offer_all(metadata=metadata), chunk)
        else:
            call = self._offer(chunk_to_wire(chunk), timeout=self._limit, metadata=metadata)
        await self._channel.answer_soon(call, self._limit)

    async def _streamed(self, call: Any, chunk: KvChunk) -> None:
        writing = asyncio.create_task(self._write(call, chunk))

        def end_writing(_: object) -> None:
            """A message that did not go, since the receiver has refused one before, would fail with an error of gRPC's
            own, which takes the place of the receiver's: it is not to hear of that."""
            if not writing.cancelling():  # else it is by its time limit that the call ends
                writing.cancel()

        call.add_done_callback(end_writing)
        try:
            await asyncio.wait({writing})
            if not writing.cancelled():
                writing.result()
            await self._in_time(call)
        finally:
            writing.cancel()
            call.cancel()  # nothing, once it is done
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, call: Any, chunk: KvChunk) -> None:
        """Each part is put together when the one before is on its way, while the caches have what gRPC is to copy."""
        with suppress(grpc.aio.AioRpcError):  # it is the call that knows why
            for part in chunk.parts():
                await self._in_time(call.write(chunk_to_wire(part)))
            await self._in_time(call.done_writing())

    async def _in_time(self, step: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._limit):
                await step
        except TimeoutError as error:
            raise PeerUnavailable(f"{self._channel.address}: nothing taken within {self._limit:g} s") from error

    async def confirm(self, confirmation: KvConfirmation) -> None:
        metadata = self._channel.metadata(confirmation.ticket.request_id)
        limit = None if confirmation.checksums else self._limit
        call = self._stub.Confirm(confirmation_to_wire(confirmation), timeout=limit, metadata=metadata)
        await self._channel.answer_soon(call, self._limit)
