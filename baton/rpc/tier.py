"""TierApi and WarmApi over gRPC: the pools' shared cache of KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

import grpc.aio

from baton.core.api import TierApi, WarmApi
from baton.core.types import TierBlock, TierChanges, TokenRequest
from baton.rpc.calls import Calls
from baton.rpc.channels import PeerChannel
from baton.rpc.serving import Service
from baton.rpc.wire.guard import require
from baton.rpc.wire.kvtransfer import (
    block_from_wire,
    block_to_wire,
    changes_from_wire,
    changes_to_wire,
    put_to_wire,
)
from baton.rpc.wire.types import token_request_from_wire, token_request_to_wire
from protos.baton.v1 import kvtransfer_pb2 as pb
from protos.baton.v1 import kvtransfer_pb2_grpc

TIER: Final = "baton.v1.TierService"
WARM: Final = "baton.v1.WarmService"
Context = grpc.aio.ServicerContext[Any, Any]


class _TierServicer(kvtransfer_pb2_grpc.TierServiceServicer):
    def __init__(self, tier: TierApi) -> None:
        self._tier = tier

    async def Changes(self, request: pb.ChangesRequest, context: Context) -> pb.ChangesResponse:
        return changes_to_wire(await self._tier.changes(request.epoch, request.version))

    async def Missing(self, request: pb.MissingRequest, context: Context) -> pb.MissingResponse:
        return pb.MissingResponse(names=await self._tier.missing(tuple(request.names)))

    async def Put(self, request: pb.PutRequest, context: Context) -> pb.PutResponse:
        await self._tier.put([block_from_wire(block) for block in request.blocks])
        return pb.PutResponse()

    async def Get(self, request: pb.GetRequest, context: Context) -> pb.GetResponse:
        return pb.GetResponse(blocks=[block_to_wire(block) for block in await self._tier.get(tuple(request.names))])

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        return pb.PinResponse(count=await self._tier.pin(tuple(request.names)))

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        await self._tier.unpin(tuple(request.names))
        return pb.UnpinResponse()

    async def Invalidate(self, request: pb.InvalidateRequest, context: Context) -> pb.InvalidateResponse:
        require(request, "graph_version")
        return pb.InvalidateResponse(count=await self._tier.invalidate(request.graph_version))


class _WarmServicer(kvtransfer_pb2_grpc.WarmServiceServicer):
    def __init__(self, warmer: WarmApi) -> None:
        self._warmer = warmer

    async def Warm(self, request: pb.WarmRequest, context: Context) -> pb.WarmResponse:
        require(request, "tokens")
        asked = token_request_from_wire(request.tokens)
        remaining = cast("float | None", context.time_remaining())
        if remaining is not None:
            asked = replace(asked, timeout=remaining)
        return pb.WarmResponse(names=await self._warmer.warm(asked))


def tier_service(tier: TierApi) -> Service:
    def mount(server: grpc.aio.Server, calls: Calls) -> None:
        kvtransfer_pb2_grpc.add_TierServiceServicer_to_server(_TierServicer(tier), server)

    return Service(TIER, mount)


def warm_service(warmer: WarmApi) -> Service:
    def mount(server: grpc.aio.Server, calls: Calls) -> None:
        kvtransfer_pb2_grpc.add_WarmServiceServicer_to_server(_WarmServicer(warmer), server)

    return Service(WARM, mount)


class TierClient(TierApi):
    """``limit``: seconds after which a tier that does not answer counts as lost. Short: requests wait for it."""

    def __init__(self, channel: PeerChannel, limit: float) -> None:
        self._channel = channel
        self._limit = limit
        self._stub = kvtransfer_pb2_grpc.TierServiceStub(channel.channel)

    async def changes(self, epoch: int, version: int) -> TierChanges:
        message = pb.ChangesRequest(epoch=epoch, version=version)
        call = self._stub.Changes(message, timeout=self._limit, metadata=self._metadata())
        return changes_from_wire(await self._channel.answer_soon(call, self._limit))

    async def missing(self, names: Sequence[bytes]) -> tuple[bytes, ...]:
        call = self._stub.Missing(pb.MissingRequest(names=names), timeout=self._limit, metadata=self._metadata())
        return tuple((await self._channel.answer_soon(call, self._limit)).names)

    async def put(self, blocks: Sequence[TierBlock]) -> None:
        call = self._stub.Put(put_to_wire(blocks), timeout=self._limit, metadata=self._metadata())
        await self._channel.answer_soon(call, self._limit)

    async def get(self, names: Sequence[bytes]) -> tuple[TierBlock, ...]:
        call = self._stub.Get(pb.GetRequest(names=names), timeout=self._limit, metadata=self._metadata())
        answer = await self._channel.answer_soon(call, self._limit)
        return tuple(block_from_wire(block) for block in answer.blocks)

    async def pin(self, names: Sequence[bytes]) -> int:
        call = self._stub.Pin(pb.PinRequest(names=names), timeout=self._limit, metadata=self._metadata())
        return (await self._channel.answer_soon(call, self._limit)).count

    async def unpin(self, names: Sequence[bytes]) -> None:
        call = self._stub.Unpin(pb.UnpinRequest(names=names), timeout=self._limit, metadata=self._metadata())
        await self._channel.answer_soon(call, self._limit)

    async def invalidate(self, graph_version: str) -> int:
        message = pb.InvalidateRequest(graph_version=graph_version)
        call = self._stub.Invalidate(message, timeout=self._limit, metadata=self._metadata())
        return (await self._channel.answer_soon(call, self._limit)).count

    def _metadata(self) -> grpc.aio.Metadata:
        return self._channel.metadata()


class WarmClient(WarmApi):
    """The call has the request's own deadline: a prompt may take long to compute."""

    def __init__(self, channel: PeerChannel) -> None:
        self._channel = channel
        self._stub = kvtransfer_pb2_grpc.WarmServiceStub(channel.channel)

    async def warm(self, request: TokenRequest) -> tuple[bytes, ...]:
        message = pb.WarmRequest(tokens=token_request_to_wire(request))
        metadata = self._channel.metadata(request.request_id)
        call = self._stub.Warm(message, timeout=request.timeout, metadata=metadata)
        return tuple((await self._channel.answer(call)).names)
