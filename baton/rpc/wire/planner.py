"""planner.proto."""

from __future__ import annotations

from baton.core.errors import InvalidRequest
from baton.core.types import Plan, PlanQuery
from baton.rpc.wire.guard import encodes, require
from baton.rpc.wire.types import candidate_from_wire, candidate_to_wire
from protos.baton.v1 import planner_pb2 as pb


@encodes("PlanRequest")
def query_to_wire(query: PlanQuery) -> pb.PlanRequest:
    return pb.PlanRequest(
        request_id=query.request_id,
        model=query.model,
        tenant=query.tenant,
        prompt_tokens=query.prompt_tokens,
        max_tokens=query.max_tokens,
        hop=query.hop,
        priority=query.priority,
        avoid=query.avoid,
        attention_window=query.attention_window,
    )


def query_from_wire(message: pb.PlanRequest) -> PlanQuery:
    require(message, "request_id")
    return PlanQuery(
        request_id=message.request_id,
        model=message.model,
        tenant=message.tenant,
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        hop=message.hop,
        priority=message.priority,
        avoid=tuple(message.avoid),
        attention_window=message.attention_window if message.HasField("attention_window") else None,
    )


def plan_to_wire(plan: Plan) -> pb.PlanResponse:
    return pb.PlanResponse(
        decode=[candidate_to_wire(candidate) for candidate in plan.decode],
        prefill=[candidate_to_wire(candidate) for candidate in plan.prefill],
        local_prefill_max_tokens=plan.local_prefill_max_tokens,
        reasons=plan.reasons,
        attention_window=plan.attention_window,
        speculation=plan.speculation,
    )


def plan_from_wire(message: pb.PlanResponse) -> Plan:
    """A plan is complete or refused: InvalidRequest when it names no decode worker, or a window that shows nothing."""
    if not message.decode:
        raise InvalidRequest(
            "PlanResponse.decode: must name at least one worker, got none", field="PlanResponse.decode"
        )
    window = message.attention_window if message.HasField("attention_window") else None
    if window == 0:
        raise InvalidRequest.out_of_range("PlanResponse.attention_window", window, "must be at least 1")
    return Plan(
        decode=tuple(candidate_from_wire(candidate) for candidate in message.decode),
        prefill=tuple(candidate_from_wire(candidate) for candidate in message.prefill),
        local_prefill_max_tokens=message.local_prefill_max_tokens,
        reasons=tuple(message.reasons),
        attention_window=window,
        speculation=message.speculation if message.HasField("speculation") else True,
    )
