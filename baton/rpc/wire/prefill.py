"""prefill.proto."""

from __future__ import annotations

from baton.core.types import PrefillRequest, PrefillResult
from baton.rpc.wire.guard import duration, encodes, require
from baton.rpc.wire.types import (
    first_token_from_wire,
    first_token_to_wire,
    ticket_from_wire,
    ticket_to_wire,
    token_request_from_wire,
    token_request_to_wire,
)
from protos.baton.v1 import prefill_pb2 as pb


@encodes("PrefillRequest")
def request_to_wire(request: PrefillRequest) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        tokens=token_request_to_wire(request.tokens),
        ticket=ticket_to_wire(request.ticket),
        skip_blocks=request.skip_blocks,
        max_wait=request.max_wait,
    )


def request_from_wire(message: pb.PrefillRequest) -> PrefillRequest:
    require(message, "tokens", "ticket")
    return PrefillRequest(
        tokens=token_request_from_wire(message.tokens),
        ticket=ticket_from_wire(message.ticket),
        skip_blocks=message.skip_blocks,
        max_wait=duration(message, "max_wait"),
    )


def result_to_wire(result: PrefillResult) -> pb.PrefillResponse:
    return pb.PrefillResponse(
        first=first_token_to_wire(result.first), worker_id=result.worker_id, kv_bytes=result.kv_bytes
    )


def result_from_wire(message: pb.PrefillResponse) -> PrefillResult:
    require(message, "first", "worker_id")
    return PrefillResult(
        first=first_token_from_wire(message.first), worker_id=message.worker_id, kv_bytes=message.kv_bytes
    )
