"""DirectoryApi over gRPC: peers and the block catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grpc.aio

from baton.core.api import DirectoryApi
from baton.core.errors import InvalidRequest
from baton.core.types import KvHandshake
from baton.rpc.calls import Calls
from baton.rpc.channels import PeerChannel
from baton.rpc.serving import Service
from baton.rpc.wire.guard import require
from baton.rpc.wire.kvtransfer import (
    announcement_to_wire,
    holders_to_wire,
    peers_from_wire,
    peers_to_wire,
    publication_to_wire,
    reset_to_wire,
)
from baton.rpc.wire.types import handshake_from_wire
from protos.baton.v1 import kvtransfer_pb2 as pb
from protos.baton.v1 import kvtransfer_pb2_grpc

NAME: Final = "baton.v1.DirectoryService"


class _Servicer(kvtransfer_pb2_grpc.DirectoryServiceServicer):
    def __init__(self, directory: DirectoryApi) -> None:
        self._directory = directory

    async def Announce(
        self, request: pb.AnnounceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AnnounceResponse:
        require(request, "peer", "address")
        await self._directory.announce(handshake_from_wire(request.peer), request.address)
        return pb.AnnounceResponse()

    async def Publish(
        self, request: pb.PublishRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PublishResponse:
        require(request, "worker_id")
        accepted = await self._directory.publish(
            request.worker_id, request.epoch, request.sequence, tuple(request.added), tuple(request.removed)
        )
        return pb.PublishResponse(accepted=accepted)

    async def Reset(self, request: pb.ResetRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.ResetResponse:
        require(request, "worker_id")
        await self._directory.reset(request.worker_id, request.epoch, request.sequence, tuple(request.held))
        return pb.ResetResponse()

    async def Holders(
        self, request: pb.HoldersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.HoldersResponse:
        return holders_to_wire(await self._directory.holders(tuple(request.hashes)))

    async def ListPeers(
        self, request: pb.ListPeersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListPeersResponse:
        return peers_to_wire(await self._directory.peers())


def directory_service(directory: DirectoryApi) -> Service:
    def mount(server: grpc.aio.Server, calls: Calls) -> None:
        kvtransfer_pb2_grpc.add_DirectoryServiceServicer_to_server(_Servicer(directory), server)

    return Service(NAME, mount)


class DirectoryClient(DirectoryApi):
    """``limit``: seconds after which a directory that does not answer counts as lost."""

    def __init__(self, channel: PeerChannel, limit: float = 5.0) -> None:
        self._channel = channel
        self._limit = limit
        self._stub = kvtransfer_pb2_grpc.DirectoryServiceStub(channel.channel)

    async def announce(self, peer: KvHandshake, address: str) -> None:
        message = announcement_to_wire(peer, address)
        call = self._stub.Announce(message, timeout=self._limit, metadata=self._channel.metadata())
        await self._channel.answer_soon(call, self._limit)

    async def publish(
        self, worker_id: str, epoch: int, sequence: int, added: Sequence[bytes], removed: Sequence[bytes]
    ) -> bool:
        message = publication_to_wire(worker_id, epoch, sequence, added, removed)
        call = self._stub.Publish(message, timeout=self._limit, metadata=self._channel.metadata())
        return (await self._channel.answer_soon(call, self._limit)).accepted

    async def reset(self, worker_id: str, epoch: int, sequence: int, held: Sequence[bytes]) -> None:
        message = reset_to_wire(worker_id, epoch, sequence, held)
        call = self._stub.Reset(message, timeout=self._limit, metadata=self._channel.metadata())
        await self._channel.answer_soon(call, self._limit)

    async def holders(self, hashes: Sequence[bytes]) -> dict[str, int]:
        message = pb.HoldersRequest(hashes=hashes)
        call = self._stub.Holders(message, timeout=self._limit, metadata=self._channel.metadata())
        return dict((await self._channel.answer_soon(call, self._limit)).leading_blocks)

    async def peers(self) -> Sequence[tuple[KvHandshake, str]]:
        call = self._stub.ListPeers(pb.ListPeersRequest(), timeout=self._limit, metadata=self._channel.metadata())
        answer = await self._channel.answer_soon(call, self._limit)
        try:
            return peers_from_wire(answer)
        except InvalidRequest as error:
            raise self._channel.incomplete(error) from error
