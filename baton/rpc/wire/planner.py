"""planner.proto."""

from __future__ import annotations

import math

from baton.core.errors import InvalidRequest
from baton.core.types import Plan, PlanLimits, PlanQuery
from baton.rpc.wire.guard import duration, encodes, require
from baton.rpc.wire.types import (
    PLAIN_CACHE,
    cache_from_wire,
    cache_to_wire,
    candidate_from_wire,
    candidate_to_wire,
    tier_from_wire,
    tier_to_wire,
)
from protos.baton.v1 import planner_pb2 as pb

_NO_LIMITS = PlanLimits()


@encodes("PlanRequest")
def query_to_wire(query: PlanQuery) -> pb.PlanRequest:
    return pb.PlanRequest(
        request_id=query.request_id,
        model=query.model,
        tenant=query.tenant,
        tier=tier_to_wire(query.tier),
        pool=query.pool,
        tenant_max_blocks=query.tenant_max_blocks,
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
        tier=tier_from_wire(message, message.tier),
        pool=message.pool,
        tenant_max_blocks=message.tenant_max_blocks if message.HasField("tenant_max_blocks") else None,
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
        limits=_limits_to_wire(plan.limits),
        cache=cache_to_wire(plan.cache),
        prefill_wait=plan.prefill_wait,
    )


def plan_from_wire(message: pb.PlanResponse) -> Plan:
    """A plan is complete or refused: InvalidRequest when it names no decode worker, a window that shows nothing, or a
    limit that allows nothing."""
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
        limits=_limits_from_wire(message.limits) if message.HasField("limits") else _NO_LIMITS,
        cache=cache_from_wire(message.cache) if message.HasField("cache") else PLAIN_CACHE,
        prefill_wait=duration(message, "prefill_wait"),
    )


def _limits_to_wire(limits: PlanLimits) -> pb.PlanLimits | None:
    if limits == _NO_LIMITS:
        return None
    return pb.PlanLimits(max_tokens=limits.max_tokens, max_chunk_tokens=limits.max_chunk_tokens, seconds=limits.seconds)


def _limits_from_wire(message: pb.PlanLimits) -> PlanLimits:
    has = message.HasField
    for name, value in (("max_tokens", message.max_tokens), ("max_chunk_tokens", message.max_chunk_tokens)):
        if has(name) and value < 1:
            raise InvalidRequest.out_of_range(f"PlanLimits.{name}", value, "must be at least 1")
    seconds = message.seconds if has("seconds") else None
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequest.out_of_range("PlanLimits.seconds", seconds, "must be a number above 0")
    return PlanLimits(
        max_tokens=message.max_tokens if has("max_tokens") else None,
        max_chunk_tokens=message.max_chunk_tokens if has("max_chunk_tokens") else None,
        seconds=seconds,
    )
