"""The shared messages of types.proto."""

from __future__ import annotations

import math
from collections.abc import Iterable

from google.protobuf.message import Message

from baton.core.errors import InvalidRequest
from baton.core.types import (
    Attempt,
    CacheClass,
    CachePolicy,
    Candidate,
    FinishReason,
    FirstToken,
    KvFormat,
    KvHandshake,
    LocalDoor,
    Placement,
    PrefillMode,
    Sampling,
    StopRules,
    Ticket,
    Tier,
    TokenLogprob,
    TokenRequest,
    Usage,
)
from baton.rpc.wire.guard import encodes, require, unknown_value
from protos.baton.v1 import types_pb2 as pb

_FINISH_TO_WIRE: dict[FinishReason | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}
_FINISH_FROM_WIRE: dict[int, FinishReason | None] = {value: reason for reason, value in _FINISH_TO_WIRE.items()}
_MODE_TO_WIRE = {PrefillMode.LOCAL: pb.PREFILL_MODE_LOCAL, PrefillMode.REMOTE: pb.PREFILL_MODE_REMOTE}
_MODE_FROM_WIRE: dict[int, PrefillMode] = {value: mode for mode, value in _MODE_TO_WIRE.items()}
_CACHE_TO_WIRE = {
    CacheClass.NONE: pb.CACHE_CLASS_NONE,
    CacheClass.NORMAL: pb.CACHE_CLASS_NORMAL,
    CacheClass.KEEP: pb.CACHE_CLASS_KEEP,
}
_CACHE_FROM_WIRE: dict[int, CacheClass] = {value: name for name, value in _CACHE_TO_WIRE.items()}
_CACHE_FROM_WIRE[pb.CACHE_CLASS_UNSPECIFIED] = CacheClass.NORMAL
_TIER_TO_WIRE = {Tier.BRONZE: pb.TIER_BRONZE, Tier.SILVER: pb.TIER_SILVER, Tier.GOLD: pb.TIER_GOLD}
_TIER_FROM_WIRE: dict[int, Tier] = {value: tier for tier, value in _TIER_TO_WIRE.items()}
_TIER_FROM_WIRE[pb.TIER_UNSPECIFIED] = Tier.BRONZE
PLAIN_CACHE = CachePolicy()  # what an absent one means


# --- requests ---------------------------------------------------------------------------------------------------------


def sampling_to_wire(sampling: Sampling) -> pb.Sampling:
    """Every field is sent, so that both ends mean the same whatever their versions' defaults are."""
    return pb.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
        seed=sampling.seed,
    )


def sampling_from_wire(message: pb.Sampling) -> Sampling:
    default = Sampling()
    has = message.HasField
    return Sampling(
        temperature=message.temperature if has("temperature") else default.temperature,
        top_k=message.top_k if has("top_k") else default.top_k,
        top_p=message.top_p if has("top_p") else default.top_p,
        min_p=message.min_p if has("min_p") else default.min_p,
        repetition_penalty=message.repetition_penalty if has("repetition_penalty") else default.repetition_penalty,
        presence_penalty=message.presence_penalty if has("presence_penalty") else default.presence_penalty,
        frequency_penalty=message.frequency_penalty if has("frequency_penalty") else default.frequency_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        seed=message.seed if has("seed") else default.seed,
    )


def stop_to_wire(stop: StopRules) -> pb.StopRules:
    return pb.StopRules(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop_token_ids=stop.stop_token_ids,
        ignore_eos=stop.ignore_eos,
    )


def stop_from_wire(message: pb.StopRules) -> StopRules:
    default = StopRules()
    return StopRules(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else default.max_tokens,
        min_tokens=message.min_tokens if message.HasField("min_tokens") else default.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def attempt_to_wire(attempt: Attempt) -> pb.Attempt:
    return pb.Attempt(hop=attempt.hop, retry=attempt.retry)


def attempt_from_wire(message: pb.Attempt) -> Attempt:
    return Attempt(hop=message.hop, retry=message.retry)


def cache_to_wire(cache: CachePolicy) -> pb.CachePolicy | None:
    """None, which is not sent, for what an absent one means."""
    if cache == PLAIN_CACHE:
        return None
    return pb.CachePolicy(cache_class=_CACHE_TO_WIRE[cache.cache_class], keep_tokens=cache.keep_tokens)


def cache_from_wire(message: pb.CachePolicy) -> CachePolicy:
    cache_class = _CACHE_FROM_WIRE.get(message.cache_class)
    if cache_class is None:
        raise unknown_value(message, "cache_class", message.cache_class)
    return CachePolicy(cache_class, message.keep_tokens)


def tier_to_wire(tier: Tier) -> pb.Tier:
    return _TIER_TO_WIRE[tier]


def tier_from_wire(message: Message, value: int) -> Tier:
    """The field ``tier`` of ``message``."""
    tier = _TIER_FROM_WIRE.get(value)
    if tier is None:
        raise unknown_value(message, "tier", value)
    return tier


@encodes("TokenRequest")
def token_request_to_wire(request: TokenRequest) -> pb.TokenRequest:
    return pb.TokenRequest(
        request_id=request.request_id,
        model=request.model,
        attempt=attempt_to_wire(request.attempt),
        prompt=request.prompt,
        generated=request.generated,
        sampling=sampling_to_wire(request.sampling),
        stop=stop_to_wire(request.stop),
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        priority=request.priority,
        tenant=request.tenant,
        tier=tier_to_wire(request.tier),
        tenant_max_blocks=request.tenant_max_blocks,
        salt=request.salt,
        timeout_seconds=request.timeout,
        attention_window=request.attention_window,
        speculation=request.speculation,
        max_chunk_tokens=request.max_chunk_tokens,
        cache=cache_to_wire(request.cache),
    )


def token_request_from_wire(message: pb.TokenRequest) -> TokenRequest:
    require(message, "request_id")
    return TokenRequest(
        request_id=message.request_id,
        prompt=tuple(message.prompt),
        model=message.model,
        attempt=attempt_from_wire(message.attempt),
        generated=tuple(message.generated),
        sampling=sampling_from_wire(message.sampling),
        stop=stop_from_wire(message.stop),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        priority=message.priority,
        tenant=message.tenant,
        tier=tier_from_wire(message, message.tier),
        tenant_max_blocks=message.tenant_max_blocks if message.HasField("tenant_max_blocks") else None,
        salt=message.salt,
        timeout=_timeout_from_wire(message),
        attention_window=message.attention_window if message.HasField("attention_window") else None,
        speculation=message.speculation if message.HasField("speculation") else True,
        max_chunk_tokens=message.max_chunk_tokens if message.HasField("max_chunk_tokens") else None,
        cache=cache_from_wire(message.cache) if message.HasField("cache") else PLAIN_CACHE,
    )


def _timeout_from_wire(message: pb.TokenRequest) -> float | None:
    if math.isnan(message.timeout_seconds):
        raise InvalidRequest.out_of_range("timeout_seconds", message.timeout_seconds, "must be a number")
    return message.timeout_seconds if message.HasField("timeout_seconds") else None


# --- answers ----------------------------------------------------------------------------------------------------------


def logprob_to_wire(logprob: TokenLogprob | None) -> pb.TokenLogprob:
    """None (a position that has no log-probability) is sent as ``absent``."""
    if logprob is None:
        return pb.TokenLogprob(absent=True)
    top = [pb.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return pb.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)


def logprob_from_wire(message: pb.TokenLogprob) -> TokenLogprob:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprob(token_id=message.token_id, logprob=message.logprob, top=top)


def prompt_logprobs_from_wire(messages: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob | None, ...]:
    return tuple(None if message.absent else logprob_from_wire(message) for message in messages)


def finish_to_wire(finish: FinishReason | None) -> pb.FinishReason:
    return _FINISH_TO_WIRE[finish]


def finish_from_wire(message: Message, value: int) -> FinishReason | None:
    """``value`` is ``message``'s field ``finish``; unset means that more follows."""
    if value not in _FINISH_FROM_WIRE:
        raise unknown_value(message, "finish", value)
    return _FINISH_FROM_WIRE[value]


def usage_to_wire(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )


def usage_from_wire(message: pb.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.cached_tokens, message.completion_tokens)


def placement_to_wire(placement: Placement) -> pb.Placement:
    return pb.Placement(
        decode_worker=placement.decode_worker,
        prefill_worker=placement.prefill_worker,
        prefill_mode=_MODE_TO_WIRE[placement.prefill_mode],
        kv_bytes=placement.kv_bytes,
    )


def placement_from_wire(message: pb.Placement) -> Placement:
    if message.prefill_mode not in _MODE_FROM_WIRE:
        raise unknown_value(message, "prefill_mode", message.prefill_mode)
    return Placement(
        decode_worker=message.decode_worker,
        prefill_worker=message.prefill_worker,
        prefill_mode=_MODE_FROM_WIRE[message.prefill_mode],
        kv_bytes=message.kv_bytes,
    )


def first_token_to_wire(first: FirstToken) -> pb.FirstToken:
    return pb.FirstToken(
        token_id=first.token_id,
        usage=usage_to_wire(first.usage),
        logprob=None if first.logprob is None else logprob_to_wire(first.logprob),
        prompt_logprobs=[logprob_to_wire(entry) for entry in first.prompt_logprobs],
        finish=finish_to_wire(first.finish),
    )


def first_token_from_wire(message: pb.FirstToken) -> FirstToken:
    require(message, "usage")
    return FirstToken(
        token_id=message.token_id,
        usage=usage_from_wire(message.usage),
        logprob=logprob_from_wire(message.logprob) if message.HasField("logprob") else None,
        prompt_logprobs=prompt_logprobs_from_wire(message.prompt_logprobs),
        finish=finish_from_wire(message, message.finish),
    )


# --- KV transfer and fleet --------------------------------------------------------------------------------------------


def candidate_to_wire(candidate: Candidate) -> pb.Candidate:
    return pb.Candidate(worker_id=candidate.worker_id, address=candidate.address, epoch=candidate.epoch)


def candidate_from_wire(message: pb.Candidate) -> Candidate:
    require(message, "worker_id", "address")
    return Candidate(worker_id=message.worker_id, address=message.address, epoch=message.epoch)


@encodes("Ticket")
def ticket_to_wire(ticket: Ticket) -> pb.Ticket:
    return pb.Ticket(
        request_id=ticket.request_id,
        attempt=attempt_to_wire(ticket.attempt),
        receiver_address=ticket.receiver_address,
        receiver_epoch=ticket.receiver_epoch,
    )


def ticket_from_wire(message: pb.Ticket) -> Ticket:
    require(message, "request_id", "attempt", "receiver_address")
    return Ticket(
        request_id=message.request_id,
        attempt=attempt_from_wire(message.attempt),
        receiver_address=message.receiver_address,
        receiver_epoch=message.receiver_epoch,
    )


def kv_format_to_wire(form: KvFormat) -> pb.KvFormat:
    return pb.KvFormat(
        dtype=form.dtype,
        block_size=form.block_size,
        layers=form.layers,
        kv_heads=form.kv_heads,
        head_dim=form.head_dim,
        layout=form.layout,
        shards=form.shards,
    )


def kv_format_from_wire(message: pb.KvFormat) -> KvFormat:
    require(message, "dtype", "block_size", "layers", "kv_heads", "head_dim", "layout")
    return KvFormat(
        dtype=message.dtype,
        block_size=message.block_size,
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        layout=message.layout,
        shards=message.shards or 1,
    )


@encodes("KvHandshake")
def handshake_to_wire(hello: KvHandshake) -> pb.KvHandshake:
    return pb.KvHandshake(
        worker_id=hello.worker_id,
        epoch=hello.epoch,
        model=hello.model,
        weights_hash=hello.weights_hash,
        format=kv_format_to_wire(hello.format),
        protocol_version=hello.protocol_version,
        features=hello.features,
        transports=hello.transports,
        host=hello.host,
        door=None if hello.door is None else pb.LocalDoor(address=hello.door.address, token=hello.door.token),
    )


def handshake_from_wire(message: pb.KvHandshake) -> KvHandshake:
    require(message, "worker_id", "format")
    return KvHandshake(
        worker_id=message.worker_id,
        epoch=message.epoch,
        model=message.model,
        weights_hash=message.weights_hash,
        format=kv_format_from_wire(message.format),
        protocol_version=message.protocol_version,
        features=tuple(message.features),
        transports=tuple(message.transports),
        host=message.host,
        door=LocalDoor(message.door.address, message.door.token) if message.HasField("door") else None,
    )
