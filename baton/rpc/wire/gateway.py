"""gateway.proto: the door's messages, for the gateway's servicer and for the client library.

``GenerateRequest`` maps to two messages: ``messages`` set makes it a ChatRequest, else it is a GenerateRequest. Two of
its fields exist twice in the core (``seed`` beside ``sampling.seed``, ``max_tokens`` beside ``stop.max_tokens``) and
once on the wire: a request read from the wire has them outside, where None means that the caller did not say. The
timeout is the call's deadline, not part of a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from baton.core.errors import InvalidRequest
from baton.core.types import ChatMessage, GenerateChunk, GenerateRequest, ModelInfo, Sampling, StopRules
from baton.rpc.wire.guard import Bounded, encodes, require
from baton.rpc.wire.types import (
    finish_from_wire,
    finish_to_wire,
    logprob_from_wire,
    logprob_to_wire,
    placement_from_wire,
    placement_to_wire,
    prompt_logprobs_from_wire,
    sampling_from_wire,
    sampling_to_wire,
    stop_from_wire,
    stop_to_wire,
    usage_from_wire,
    usage_to_wire,
)
from protos.baton.v1 import gateway_pb2 as pb

# --- requests ---------------------------------------------------------------------------------------------------------


def _options_to_wire(request: GenerateRequest) -> pb.GenerateOptions:
    sampling = sampling_to_wire(request.sampling)
    if request.seed is not None:
        sampling.seed = request.seed
    elif request.sampling.seed == Sampling().seed:
        sampling.ClearField("seed")
    stop = stop_to_wire(request.stop)
    if request.max_tokens is not None:
        stop.max_tokens = request.max_tokens
    elif request.stop.max_tokens == StopRules().max_tokens:
        stop.ClearField("max_tokens")
    return pb.GenerateOptions(
        sampling=sampling,
        stop=stop,
        stop_strings=request.stop_strings,
        n=request.n,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        request_id=request.request_id,
        resume=[pb.ResumedChoice(token_ids=token_ids) for token_ids in request.resume],
    )


def _options_from_wire(message: pb.GenerateOptions) -> GenerateRequest:
    """A request that has everything but its prompt and model."""
    sampling, stop = message.sampling, message.stop
    return GenerateRequest(
        sampling=replace(sampling_from_wire(sampling), seed=Sampling().seed),
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop=replace(stop_from_wire(stop), max_tokens=StopRules().max_tokens),
        max_tokens=stop.max_tokens if stop.HasField("max_tokens") else None,
        stop_strings=tuple(message.stop_strings),
        n=message.n if message.HasField("n") else 1,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        request_id=message.request_id,
        resume=tuple(tuple(choice.token_ids) for choice in message.resume),
    )


_COUNT = (0, 2**31 - 1)
_POSITIVE = (1, 2**31 - 1)
_UINT32 = (0, 2**32 - 1)
_UINT64 = (0, 2**64 - 1)


def _integers(request: GenerateRequest) -> Iterator[Bounded]:
    """Every integer of a request, with what its field in gateway.proto and types.proto can mean."""
    sampling, stop = request.sampling, request.stop
    yield Bounded("top_k", sampling.top_k, *_COUNT)
    yield Bounded("seed", sampling.seed if request.seed is None else request.seed, *_UINT64)
    yield Bounded("max_tokens", stop.max_tokens if request.max_tokens is None else request.max_tokens, *_POSITIVE)
    yield Bounded("min_tokens", stop.min_tokens, *_COUNT)
    yield Bounded("n", request.n, *_POSITIVE)
    yield Bounded("logprobs", request.logprobs or 0, *_COUNT)
    yield Bounded("prompt_logprobs", request.prompt_logprobs or 0, *_COUNT)
    lists = {"prompt_token_ids": request.prompt_token_ids or (), "stop_token_ids": stop.stop_token_ids}
    lists |= {"logit_bias": tuple(token_id for token_id, _ in sampling.logit_bias)}
    lists |= {f"resume[{choice}]": token_ids for choice, token_ids in enumerate(request.resume)}
    for name, values in lists.items():
        yield from (Bounded(f"{name}[{index}]", value, *_UINT32) for index, value in enumerate(values))


@encodes("GenerateRequest", _integers)
def generate_to_wire(request: GenerateRequest) -> pb.GenerateRequest:
    """For a request with ``text`` or ``prompt_token_ids``."""
    message = pb.GenerateRequest(model=request.model, options=_options_to_wire(request))
    if request.text is not None:
        message.text = request.text
    if request.prompt_token_ids is not None:
        message.prompt_token_ids.CopyFrom(pb.TokenIds(ids=request.prompt_token_ids))
    return message


def generate_from_wire(message: pb.GenerateRequest, timeout: float | None = None) -> GenerateRequest:
    which = message.WhichOneof("prompt")
    return replace(
        _options_from_wire(message.options),
        model=message.model,
        text=message.text if which == "text" else None,
        prompt_token_ids=tuple(message.prompt_token_ids.ids) if which == "prompt_token_ids" else None,
        timeout=timeout,
    )


@encodes("ChatRequest", _integers)
def chat_to_wire(request: GenerateRequest) -> pb.ChatRequest:
    """For a request with ``messages``."""
    return pb.ChatRequest(
        model=request.model, messages=_messages_to_wire(request.messages or ()), options=_options_to_wire(request)
    )


def chat_from_wire(message: pb.ChatRequest, timeout: float | None = None) -> GenerateRequest:
    return replace(
        _options_from_wire(message.options),
        model=message.model,
        messages=_messages_from_wire(message.messages),
        timeout=timeout,
    )


def _messages_to_wire(messages: Iterable[ChatMessage]) -> list[pb.ChatMessage]:
    return [pb.ChatMessage(role=message.role, content=message.content) for message in messages]


def _messages_from_wire(messages: Iterable[pb.ChatMessage]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(message.role, message.content) for message in messages)


@encodes("CountTokensRequest")
def count_to_wire(request: GenerateRequest) -> pb.CountTokensRequest:
    """Only model and ``text`` or ``messages`` travel."""
    if request.messages is not None:
        conversation = pb.Conversation(messages=_messages_to_wire(request.messages))
        return pb.CountTokensRequest(model=request.model, conversation=conversation)
    if request.text is None:
        raise InvalidRequest("text: a count needs text or messages, got neither", field="text")
    return pb.CountTokensRequest(model=request.model, text=request.text)


def count_from_wire(message: pb.CountTokensRequest, timeout: float | None = None) -> GenerateRequest:
    which = message.WhichOneof("prompt")
    return GenerateRequest(
        model=message.model,
        text=message.text if which == "text" else None,
        messages=_messages_from_wire(message.conversation.messages) if which == "conversation" else None,
        timeout=timeout,
    )


# --- answers ----------------------------------------------------------------------------------------------------------


def delta_to_wire(chunk: GenerateChunk) -> pb.Delta:
    return pb.Delta(
        request_id=chunk.request_id,
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=[logprob_to_wire(entry) for entry in chunk.logprobs],
        prompt_logprobs=[logprob_to_wire(entry) for entry in chunk.prompt_logprobs],
        finish=finish_to_wire(chunk.finish),
        usage=None if chunk.usage is None else usage_to_wire(chunk.usage),
        placement=None if chunk.placement is None else placement_to_wire(chunk.placement),
        migrations=chunk.migrations,
        limit=chunk.limit,
    )


def delta_from_wire(message: pb.Delta) -> GenerateChunk:
    require(message, "request_id")
    return GenerateChunk(
        request_id=message.request_id,
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(map(logprob_from_wire, message.logprobs)),
        prompt_logprobs=prompt_logprobs_from_wire(message.prompt_logprobs),
        finish=finish_from_wire(message, message.finish),
        usage=usage_from_wire(message.usage) if message.HasField("usage") else None,
        placement=placement_from_wire(message.placement) if message.HasField("placement") else None,
        migrations=message.migrations,
        limit=message.limit,
    )


def model_to_wire(info: ModelInfo) -> pb.Model:
    return pb.Model(
        model=info.model,
        architecture=info.architecture,
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        has_tokenizer=info.has_tokenizer,
        has_chat_template=info.has_chat_template,
        workers=info.workers,
    )


def model_from_wire(message: pb.Model) -> ModelInfo:
    require(message, "model")
    return ModelInfo(
        model=message.model,
        architecture=message.architecture,
        context_length=message.context_length,
        vocab_size=message.vocab_size,
        has_tokenizer=message.has_tokenizer,
        has_chat_template=message.has_chat_template,
        workers=message.workers,
    )
