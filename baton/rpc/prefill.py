"""PrefillApi over gRPC. The call is the request's life: cancelling it is the abort, its deadline is the request's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, cast

import grpc.aio

from baton.core.api import PrefillApi
from baton.core.errors import InvalidRequest
from baton.core.types import PrefillRequest, PrefillResult
from baton.rpc.calls import Calls
from baton.rpc.channels import PeerChannel
from baton.rpc.serving import Service
from baton.rpc.wire.prefill import request_from_wire, request_to_wire, result_from_wire, result_to_wire
from protos.baton.v1 import prefill_pb2 as pb
from protos.baton.v1 import prefill_pb2_grpc

NAME: Final = "baton.v1.PrefillService"


class _Servicer(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, prefill: PrefillApi) -> None:
        self._prefill = prefill

    async def Prefill(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PrefillResponse:
        asked = request_from_wire(request)
        remaining = cast("float | None", context.time_remaining())
        if remaining is not None:  # what the way here has used up is gone
            asked = replace(asked, tokens=replace(asked.tokens, timeout=remaining))
        return result_to_wire(await self._prefill.prefill(asked))


def prefill_service(prefill: PrefillApi) -> Service:
    def mount(server: grpc.aio.Server, calls: Calls) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(_Servicer(prefill), server)

    return Service(NAME, mount)


class PrefillClient(PrefillApi):
    def __init__(self, channel: PeerChannel) -> None:
        self._channel = channel
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel.channel)

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        message = request_to_wire(request)
        metadata = self._channel.metadata(request.tokens.request_id)
        answer = await self._channel.answer(
            self._stub.Prefill(message, timeout=request.tokens.timeout, metadata=metadata)
        )
        try:
            return result_from_wire(answer)
        except InvalidRequest as error:
            raise self._channel.incomplete(error) from error
