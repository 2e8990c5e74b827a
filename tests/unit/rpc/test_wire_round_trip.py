"""What is sent is what arrives, for every noun that crosses the wire."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core import types
from baton.core.errors import InvalidRequest
from baton.rpc.wire import decode, gateway, kvtransfer, planner, prefill
from baton.rpc.wire import types as shared
from baton.rpc.wire.offer import Offer
from protos.baton.v1 import decode_pb2, gateway_pb2, kvtransfer_pb2, planner_pb2, types_pb2

T = TypeVar("T")

UINT32 = st.integers(0, 2**32 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
UINT64 = st.integers(0, 2**64 - 1)
COUNT = st.integers(0, 2**31 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
NAME = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
NUMBER = st.floats(allow_nan=False)
# The bias is a float32 on the wire.
BIAS = st.floats(width=32, allow_nan=False)
IDS = st.lists(UINT32, max_size=8).map(tuple)


def tuples(strategy: st.SearchStrategy[T], most: int = 4) -> st.SearchStrategy[tuple[T, ...]]:
    return st.lists(strategy, max_size=most).map(tuple)


ATTEMPT = st.builds(types.Attempt, UINT32, UINT32)
SAMPLING = st.builds(
    types.Sampling,
    temperature=NUMBER,
    top_k=INT32,
    top_p=NUMBER,
    min_p=NUMBER,
    repetition_penalty=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    logit_bias=tuples(st.tuples(UINT32, BIAS)),
    seed=UINT64,
)
STOP = st.builds(types.StopRules, INT32, INT32, IDS, st.booleans())
LOGPROB = st.builds(types.TokenLogprob, UINT32, NUMBER, tuples(st.tuples(UINT32, NUMBER)))
USAGE = st.builds(types.Usage, UINT32, UINT32, UINT32)
FINISH = st.none() | st.sampled_from(types.FinishReason)
PLACEMENT = st.builds(types.Placement, TEXT, TEXT, st.sampled_from(types.PrefillMode), UINT64)
CACHE = st.builds(types.CachePolicy, st.sampled_from(types.CacheClass), UINT32)
REQUEST = st.builds(
    types.TokenRequest,
    request_id=NAME,
    prompt=IDS,
    model=TEXT,
    attempt=ATTEMPT,
    generated=IDS,
    sampling=SAMPLING,
    stop=STOP,
    logprobs=st.none() | INT32,
    prompt_logprobs=st.none() | INT32,
    priority=INT32,
    tenant=TEXT,
    tier=st.sampled_from(types.Tier),
    tenant_max_blocks=st.none() | UINT32,
    salt=st.binary(max_size=8),
    timeout=st.none() | NUMBER,
    attention_window=st.none() | UINT32,
    speculation=st.booleans(),
    max_chunk_tokens=st.none() | UINT32,
    cache=CACHE,
)
LIMITS = st.builds(
    types.PlanLimits,
    max_tokens=st.none() | st.integers(1, 2**32 - 1),
    max_chunk_tokens=st.none() | st.integers(1, 2**32 - 1),
    seconds=st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
)
CANDIDATE = st.builds(types.Candidate, NAME, NAME, UINT64)
TICKET = st.builds(types.Ticket, NAME, ATTEMPT, NAME, UINT64)
FORMAT = st.builds(types.KvFormat, NAME, *[st.integers(1, 2**32 - 1)] * 4, NAME, st.integers(1, 2**32 - 1))
DOOR = st.builds(types.LocalDoor, TEXT, st.binary(max_size=16))
HANDSHAKE = st.builds(
    types.KvHandshake, NAME, UINT64, TEXT, TEXT, FORMAT, UINT32, tuples(TEXT), tuples(TEXT), TEXT, st.none() | DOOR
)
FIRST = st.builds(types.FirstToken, UINT32, USAGE, st.none() | LOGPROB, tuples(st.none() | LOGPROB), FINISH)
TOKEN_CHUNK = st.builds(
    types.TokenChunk,
    token_ids=IDS,
    logprobs=tuples(LOGPROB),
    prompt_logprobs=tuples(st.none() | LOGPROB),
    finish=FINISH,
    usage=st.none() | USAGE,
    placement=st.none() | PLACEMENT,
)
BLOCKS = st.integers(1, 2**32 - 1)
SOURCE = st.builds(types.KvSource, UINT64, IDS)
CHUNK = st.builds(
    types.KvChunk,
    TICKET,
    UINT32,
    BLOCKS,
    st.binary(max_size=64),
    tuples(st.binary(max_size=16)),
    st.none() | SOURCE,
    st.none() | FORMAT,
    late_checksums=st.binary(max_size=16),
)
TIER_NAMES = tuples(st.binary(min_size=16, max_size=16))
TIER_CHANGES = st.builds(types.TierChanges, UINT64, UINT64, st.booleans(), TIER_NAMES, TIER_NAMES)
TIER_BLOCK = st.builds(types.TierBlock, st.binary(max_size=16), st.binary(max_size=64), st.binary(max_size=16), TEXT)
CONFIRMATION = st.builds(types.KvConfirmation, TICKET, UINT32, BLOCKS, tuples(st.binary(max_size=16)))
MESSAGES = tuples(st.builds(types.ChatMessage, TEXT, TEXT))
# Seed and max_tokens exist twice in a GenerateRequest and once on the wire: outside.
GENERATE = st.builds(
    types.GenerateRequest,
    model=TEXT,
    sampling=SAMPLING.map(lambda sampling: replace(sampling, seed=0)),
    seed=st.none() | UINT64,
    stop=STOP.map(lambda stop: replace(stop, max_tokens=types.StopRules().max_tokens)),
    max_tokens=st.none() | INT32,
    stop_strings=tuples(TEXT),
    n=INT32,
    logprobs=st.none() | INT32,
    prompt_logprobs=st.none() | INT32,
    request_id=TEXT,
    resume=tuples(IDS),
    timeout=st.none() | NUMBER,
)
DELTA = st.builds(
    types.GenerateChunk,
    request_id=NAME,
    index=UINT32,
    text=TEXT,
    token_ids=IDS,
    logprobs=tuples(LOGPROB),
    prompt_logprobs=tuples(st.none() | LOGPROB),
    finish=FINISH,
    usage=st.none() | USAGE,
    placement=st.none() | PLACEMENT,
    migrations=UINT32,
    limit=TEXT,
)
MODEL = st.builds(types.ModelInfo, NAME, TEXT, UINT32, UINT32, st.booleans(), st.booleans(), UINT32)


def over_the_wire(message: Message | Offer) -> Any:
    return type(message).FromString(message.SerializeToString())


PAIRS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Message | Offer], Callable[[Any], Any]]] = {
    "sampling": (SAMPLING, shared.sampling_to_wire, shared.sampling_from_wire),
    "stop": (STOP, shared.stop_to_wire, shared.stop_from_wire),
    "token_request": (REQUEST, shared.token_request_to_wire, shared.token_request_from_wire),
    "first_token": (FIRST, shared.first_token_to_wire, shared.first_token_from_wire),
    "placement": (PLACEMENT, shared.placement_to_wire, shared.placement_from_wire),
    "candidate": (CANDIDATE, shared.candidate_to_wire, shared.candidate_from_wire),
    "ticket": (TICKET, shared.ticket_to_wire, shared.ticket_from_wire),
    "handshake": (HANDSHAKE, shared.handshake_to_wire, shared.handshake_from_wire),
    "query": (
        st.builds(
            types.PlanQuery,
            *(NAME, TEXT, TEXT, UINT32, UINT32, UINT32, INT32, tuples(TEXT)),
            tier=st.sampled_from(types.Tier),
            pool=TEXT,
            tenant_max_blocks=st.none() | UINT32,
        ),
        planner.query_to_wire,
        planner.query_from_wire,
    ),
    "plan": (
        st.builds(
            types.Plan,
            st.lists(CANDIDATE, min_size=1, max_size=3).map(tuple),
            tuples(CANDIDATE),
            UINT32,
            tuples(TEXT),
            attention_window=st.none() | st.integers(1, 2**32 - 1),
            speculation=st.booleans(),
            limits=LIMITS,
            cache=CACHE,
        ),
        planner.plan_to_wire,
        planner.plan_from_wire,
    ),
    "prefill_request": (
        st.builds(types.PrefillRequest, REQUEST, TICKET, UINT32),
        prefill.request_to_wire,
        prefill.request_from_wire,
    ),
    "prefill_result": (
        st.builds(types.PrefillResult, FIRST, NAME, UINT64),
        prefill.result_to_wire,
        prefill.result_from_wire,
    ),
    "kv_chunk": (CHUNK, kvtransfer.chunk_to_wire, kvtransfer.chunk_from_wire),
    "kv_confirmation": (CONFIRMATION, kvtransfer.confirmation_to_wire, kvtransfer.confirmation_from_wire),
    "tier_changes": (TIER_CHANGES, kvtransfer.changes_to_wire, kvtransfer.changes_from_wire),
    "tier_block": (TIER_BLOCK, kvtransfer.block_to_wire, kvtransfer.block_from_wire),
    "peers": (tuples(st.tuples(HANDSHAKE, NAME)), kvtransfer.peers_to_wire, kvtransfer.peers_from_wire),
    "decode_request": (
        st.builds(types.DecodeRequest, REQUEST, tuples(CANDIDATE), UINT32),
        lambda request: decode.open_to_wire(7, request),
        decode.request_from_wire,
    ),
    "token_chunk": (TOKEN_CHUNK, lambda chunk: decode.chunk_to_wire(7, chunk), decode.chunk_from_wire),
    "delta": (DELTA, gateway.delta_to_wire, gateway.delta_from_wire),
    "model": (MODEL, gateway.model_to_wire, gateway.model_from_wire),
}


@pytest.mark.parametrize("pair", PAIRS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_sent_is_what_arrives(pair: str, data: st.DataObject) -> None:
    strategy, to_wire, from_wire = PAIRS[pair]
    value = data.draw(strategy)
    assert from_wire(over_the_wire(to_wire(value))) == value


@settings(max_examples=100, deadline=None)
@given(request=GENERATE, prompt=TEXT | IDS | MESSAGES.map(list))
def test_a_generate_request_arrives_as_it_was_sent(
    request: types.GenerateRequest, prompt: str | tuple[int, ...] | list[types.ChatMessage]
) -> None:
    if isinstance(prompt, list):
        request = replace(request, messages=tuple(prompt))
        arrived = gateway.chat_from_wire(over_the_wire(gateway.chat_to_wire(request)), request.timeout)
    else:
        request = (
            replace(request, text=prompt) if isinstance(prompt, str) else replace(request, prompt_token_ids=prompt)
        )
        arrived = gateway.generate_from_wire(over_the_wire(gateway.generate_to_wire(request)), request.timeout)
    assert arrived == request


@given(model=TEXT, prompt=TEXT | MESSAGES)
def test_a_count_request_arrives_as_it_was_sent(model: str, prompt: str | tuple[types.ChatMessage, ...]) -> None:
    text, messages = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    request = types.GenerateRequest(model=model, text=text, messages=messages)
    assert gateway.count_from_wire(over_the_wire(gateway.count_to_wire(request))) == request


def test_a_seed_or_limit_given_inside_is_found_outside() -> None:
    request = types.GenerateRequest(
        text="x", sampling=types.Sampling(seed=5), stop=types.StopRules(max_tokens=7, min_tokens=2)
    )
    arrived = gateway.generate_from_wire(gateway.generate_to_wire(request))
    assert (arrived.seed, arrived.max_tokens, arrived.stop.min_tokens) == (5, 7, 2)
    both = replace(request, seed=6, max_tokens=8)
    arrived = gateway.generate_from_wire(gateway.generate_to_wire(both))
    assert (arrived.seed, arrived.max_tokens) == (6, 8)


def test_what_a_caller_leaves_out_takes_the_cores_defaults() -> None:
    request = gateway.generate_from_wire(gateway_pb2.GenerateRequest(text="x"))
    assert request == types.GenerateRequest(text="x")
    tokens = shared.token_request_from_wire(types_pb2.TokenRequest(request_id="r", prompt=[1]))
    assert tokens == types.TokenRequest("r", (1,))


def test_a_generate_request_without_a_prompt_arrives_without_one() -> None:
    request = gateway.generate_from_wire(gateway_pb2.GenerateRequest(model="m"))
    assert (request.text, request.prompt_token_ids, request.messages) == (None, None, None)


@pytest.mark.parametrize(
    ("from_wire", "message", "field"),
    [
        (shared.token_request_from_wire, types_pb2.TokenRequest(prompt=[1]), "TokenRequest.request_id"),
        (shared.ticket_from_wire, types_pb2.Ticket(request_id="r", receiver_address="a"), "Ticket.attempt"),
        (shared.handshake_from_wire, types_pb2.KvHandshake(worker_id="w"), "KvHandshake.format"),
        (shared.candidate_from_wire, types_pb2.Candidate(worker_id="w"), "Candidate.address"),
        (shared.first_token_from_wire, types_pb2.FirstToken(token_id=1), "FirstToken.usage"),
        (shared.placement_from_wire, types_pb2.Placement.FromString(b"\x18\x09"), "Placement.prefill_mode"),
        (planner.plan_from_wire, planner_pb2.PlanResponse(), "PlanResponse.decode"),
        (planner.query_from_wire, planner_pb2.PlanRequest(), "PlanRequest.request_id"),
        (kvtransfer.chunk_from_wire, Offer(kvtransfer_pb2.OfferRequest()), "OfferRequest.ticket"),
        (kvtransfer.peers_from_wire, kvtransfer_pb2.ListPeersResponse(peers=[{}]), "Peer.handshake"),
        (decode.request_from_wire, decode_pb2.OpenRequest(stream=1), "OpenRequest.tokens"),
        (decode.chunk_from_wire, decode_pb2.StreamChunk.FromString(b"\x28\x63"), "StreamChunk.finish"),
        (gateway.delta_from_wire, gateway_pb2.Delta(), "Delta.request_id"),
        (gateway.model_from_wire, gateway_pb2.Model(), "Model.model"),
    ],
)
def test_an_incomplete_message_is_refused_by_field(
    from_wire: Callable[[Any], object], message: Message | Offer, field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        from_wire(message)
    assert raised.value.field == field
    assert field in raised.value.message


def test_a_time_limit_that_is_no_number_is_refused_by_field() -> None:
    with pytest.raises(InvalidRequest) as raised:
        shared.token_request_from_wire(types_pb2.TokenRequest(request_id="r", prompt=[1], timeout_seconds=math.nan))
    assert raised.value.field == "timeout_seconds"


@pytest.mark.parametrize(
    "request_", [types.TokenRequest("r", (-1,)), types.TokenRequest("r", (2**32,)), types.TokenRequest("\udc80", (1,))]
)
def test_a_value_that_no_field_can_carry_is_refused(request_: types.TokenRequest) -> None:
    with pytest.raises(InvalidRequest, match="TokenRequest"):
        shared.token_request_to_wire(request_)
