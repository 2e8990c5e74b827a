"""PlannerApi over gRPC."""

from __future__ import annotations

from typing import Any, Final

import grpc.aio

from baton.core.api import PlannerApi
from baton.core.errors import InvalidRequest
from baton.core.types import Plan, PlanQuery
from baton.rpc.calls import Calls
from baton.rpc.channels import PeerChannel
from baton.rpc.serving import Service
from baton.rpc.wire.planner import plan_from_wire, plan_to_wire, query_from_wire, query_to_wire
from protos.baton.v1 import planner_pb2 as pb
from protos.baton.v1 import planner_pb2_grpc

NAME: Final = "baton.v1.PlannerService"


class _Servicer(planner_pb2_grpc.PlannerServiceServicer):
    def __init__(self, planner: PlannerApi) -> None:
        self._planner = planner

    async def Plan(self, request: pb.PlanRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.PlanResponse:
        return plan_to_wire(await self._planner.plan(query_from_wire(request)))


def planner_service(planner: PlannerApi) -> Service:
    def mount(server: grpc.aio.Server, calls: Calls) -> None:
        planner_pb2_grpc.add_PlannerServiceServicer_to_server(_Servicer(planner), server)

    return Service(NAME, mount)


class PlannerClient(PlannerApi):
    """``limit``: seconds after which a silent planner counts as unavailable; callers may wait for less."""

    def __init__(self, channel: PeerChannel, limit: float = 5.0) -> None:
        self._channel = channel
        self._limit = limit
        self._stub = planner_pb2_grpc.PlannerServiceStub(channel.channel)

    async def plan(self, query: PlanQuery) -> Plan:
        metadata = self._channel.metadata(query.request_id)
        call = self._stub.Plan(query_to_wire(query), timeout=self._limit, metadata=metadata)
        answer = await self._channel.answer_soon(call, self._limit)
        try:
            return plan_from_wire(answer)
        except InvalidRequest as error:
            raise self._channel.incomplete(error) from error
