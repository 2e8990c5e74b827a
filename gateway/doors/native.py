"""Baton's own gRPC door: GatewayService over ``GatewayApi``.

Callers show their API key as ``authorization: Bearer KEY`` or ``x-api-key: KEY``. Typed errors, the drain and the call
metrics come from ``baton.rpc.serving``, which mounts this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import grpc
import grpc.aio

from baton.core.api import GatewayApi
from baton.core.errors import Cancelled, Expired
from baton.core.streams import closing
from baton.core.types import GenerateRequest, Principal
from baton.rpc.api_key import presented_key
from baton.rpc.calls import Calls
from baton.rpc.interceptors import send
from baton.rpc.rate_limits import granted_metadata
from baton.rpc.serving import Service
from baton.rpc.wire.gateway import chat_from_wire, count_from_wire, delta_to_wire, generate_from_wire, model_to_wire
from gateway.callers import Callers
from protos.baton.v1 import gateway_pb2 as pb
from protos.baton.v1 import gateway_pb2_grpc

NAME = "baton.v1.GatewayService"

Context = grpc.aio.ServicerContext[Any, Any]


def native_door(gateway: GatewayApi, callers: Callers, *, stall_seconds: float) -> Service:
    """The door, ready to be served. A client that reads nothing for ``stall_seconds`` is cancelled."""

    def mount(server: grpc.aio.Server, calls: Calls) -> None:
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(_Servicer(gateway, callers, stall_seconds), server)

    return Service(NAME, mount)


class _Servicer(gateway_pb2_grpc.GatewayServiceServicer):
    def __init__(self, gateway: GatewayApi, callers: Callers, stall_seconds: float) -> None:
        self._gateway = gateway
        self._callers = callers
        self._stall_seconds = stall_seconds

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        caller = await self._caller(context)
        await self._stream(generate_from_wire(request, _remaining(context)), caller, context, _generate_response)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]
        caller = await self._caller(context)
        await self._stream(chat_from_wire(request, _remaining(context)), caller, context, _chat_response)

    async def CountTokens(self, request: pb.CountTokensRequest, context: Context) -> pb.CountTokensResponse:
        caller = await self._caller(context)
        ids = await self._gateway.count_tokens(count_from_wire(request, _remaining(context)), caller)
        return pb.CountTokensResponse(tokens=len(ids), token_ids=ids)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        models = await self._gateway.list_models(await self._caller(context))
        return pb.ListModelsResponse(models=map(model_to_wire, models))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        caller = await self._caller(context)
        return pb.GetModelResponse(model=model_to_wire(await self._gateway.get_model(request.model, caller)))

    async def _stream(
        self, request: GenerateRequest, caller: Principal, context: Context, response: Callable[[pb.Delta], object]
    ) -> None:
        async with closing(self._gateway.generate(request, caller)) as chunks:
            async for chunk in chunks:
                if chunk.quota and (left := granted_metadata(chunk.quota)):
                    await context.send_initial_metadata(left)
                await self._write(response(delta_to_wire(chunk)), context)

    async def _write(self, message: object, context: Context) -> None:
        """Returns when the transport took the message, which is how a slow client slows its own stream."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                await send(message, context)
        except TimeoutError as error:
            raise Cancelled(f"the client read nothing for {self._stall_seconds:g} s") from error

    async def _caller(self, context: Context) -> Principal:
        return await self._callers.authenticate(presented_key(context))


def _generate_response(delta: pb.Delta) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=delta)


def _chat_response(delta: pb.Delta) -> pb.ChatResponse:
    return pb.ChatResponse(delta=delta)


def _remaining(context: Context) -> float | None:
    """Seconds that the caller gives us; None without a deadline. Expired when there are none left."""
    remaining = cast("float | None", context.time_remaining())
    if remaining is not None and remaining <= 0:
        raise Expired("deadline passed before the request was read")
    return remaining
