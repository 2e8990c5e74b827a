"""The gateway over gRPC, as its callers see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc.aio

from baton.core.errors import InvalidRequest
from baton.core.types import GenerateChunk, GenerateRequest, ModelInfo
from baton.rpc.channels import PeerChannel
from baton.rpc.errors import from_rpc_error
from baton.rpc.wire.gateway import chat_to_wire, count_to_wire, delta_from_wire, generate_to_wire, model_from_wire
from protos.baton.v1 import gateway_pb2 as pb
from protos.baton.v1 import gateway_pb2_grpc

Responses = (
    grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]
    | grpc.aio.UnaryStreamCall[pb.ChatRequest, pb.ChatResponse]
)


class GatewayClient:
    """``GatewayApi`` without the principal: who calls is said by the channel's token, which holds the API key."""

    def __init__(self, channel: PeerChannel) -> None:
        self._channel = channel
        self._stub = gateway_pb2_grpc.GatewayServiceStub(channel.channel)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """One call, its chunks as they come. Closing the stream cancels the call."""
        call = self._open(request)
        try:
            async for response in call:
                yield delta_from_wire(response.delta)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._channel.address) from error
        except InvalidRequest as error:
            raise self._channel.incomplete(error) from error
        finally:
            call.cancel()

    async def count_tokens(self, request: GenerateRequest) -> tuple[int, ...]:
        call = self._stub.CountTokens(
            count_to_wire(request), timeout=request.timeout, metadata=self._channel.metadata(request.request_id)
        )
        return tuple((await self._channel.answer(call)).token_ids)

    async def list_models(self, timeout: float | None = None) -> Sequence[ModelInfo]:
        call = self._stub.ListModels(pb.ListModelsRequest(), timeout=timeout, metadata=self._channel.metadata())
        answer = await self._channel.answer(call)
        return [model_from_wire(model) for model in answer.models]

    async def get_model(self, model: str, timeout: float | None = None) -> ModelInfo:
        request = pb.GetModelRequest(model=model)
        call = self._stub.GetModel(request, timeout=timeout, metadata=self._channel.metadata())
        return model_from_wire((await self._channel.answer(call)).model)

    def _open(self, request: GenerateRequest) -> Responses:
        metadata = self._channel.metadata(request.request_id)
        if request.messages is not None:
            return self._stub.Chat(chat_to_wire(request), timeout=request.timeout, metadata=metadata)
        return self._stub.Generate(generate_to_wire(request), timeout=request.timeout, metadata=metadata)
