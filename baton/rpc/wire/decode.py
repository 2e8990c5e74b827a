"""decode.proto: what travels on the link between a gateway and a decode worker."""

from __future__ import annotations

from baton.core.errors import BatonError
from baton.core.types import DecodeRequest, TokenChunk
from baton.rpc.errors import to_detail
from baton.rpc.wire.guard import duration, encodes, require
from baton.rpc.wire.types import (
    candidate_from_wire,
    candidate_to_wire,
    finish_from_wire,
    finish_to_wire,
    logprob_from_wire,
    logprob_to_wire,
    placement_from_wire,
    placement_to_wire,
    prompt_logprobs_from_wire,
    token_request_from_wire,
    token_request_to_wire,
    usage_from_wire,
    usage_to_wire,
)
from protos.baton.v1 import decode_pb2 as pb


@encodes("OpenRequest")
def open_to_wire(stream: int, request: DecodeRequest, traceparent: str = "") -> pb.OpenRequest:
    return pb.OpenRequest(
        stream=stream,
        tokens=token_request_to_wire(request.tokens),
        prefill=[candidate_to_wire(candidate) for candidate in request.prefill],
        local_prefill_max_tokens=request.local_prefill_max_tokens,
        traceparent=traceparent,
        prefill_wait=request.prefill_wait,
    )


def request_from_wire(message: pb.OpenRequest) -> DecodeRequest:
    require(message, "tokens")
    return DecodeRequest(
        tokens=token_request_from_wire(message.tokens),
        prefill=tuple(candidate_from_wire(candidate) for candidate in message.prefill),
        local_prefill_max_tokens=message.local_prefill_max_tokens,
        prefill_wait=duration(message, "prefill_wait"),
    )


def chunk_to_wire(stream: int, chunk: TokenChunk) -> pb.StreamChunk:
    message = pb.StreamChunk(stream=stream, token_ids=chunk.token_ids, finish=finish_to_wire(chunk.finish))
    # Most chunks are one token and nothing else: an absent part is not even built.
    if chunk.logprobs:
        message.logprobs.extend(logprob_to_wire(entry) for entry in chunk.logprobs)
    if chunk.prompt_logprobs:
        message.prompt_logprobs.extend(logprob_to_wire(entry) for entry in chunk.prompt_logprobs)
    if chunk.usage is not None:
        message.usage.CopyFrom(usage_to_wire(chunk.usage))
    if chunk.placement is not None:
        message.placement.CopyFrom(placement_to_wire(chunk.placement))
    return message


def end_to_wire(stream: int, error: BatonError | None) -> pb.StreamChunk:
    """The end of a request: complete, or with ``error``."""
    if error is None:
        return pb.StreamChunk(stream=stream, last=True)
    return pb.StreamChunk(stream=stream, error=to_detail(error), last=True)


def chunk_from_wire(message: pb.StreamChunk) -> TokenChunk:
    return TokenChunk(
        token_ids=tuple(message.token_ids),
        logprobs=tuple(map(logprob_from_wire, message.logprobs)),
        prompt_logprobs=prompt_logprobs_from_wire(message.prompt_logprobs),
        finish=finish_from_wire(message, message.finish),
        usage=usage_from_wire(message.usage) if message.HasField("usage") else None,
        placement=placement_from_wire(message.placement) if message.HasField("placement") else None,
    )
