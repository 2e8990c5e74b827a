"""Every bound on what a client may ask. Pure; each refusal names the field, the limit and the value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import InvalidRequest
from baton.core.types import MAX_REQUEST_ID, GenerateRequest, ModelCard, Sampling, StopRules
from baton.text.stop_strings import check_stop_strings

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for, whatever the model."""

    default_max_tokens: int = 1024
    choices: int = 16
    logprobs: int = 20
    prompt_bytes: int = 4 * 1024 * 1024
    messages: int = 4096
    stop_token_ids: int = 256
    logit_bias: int = 1024


def check_request(request: GenerateRequest, limits: Limits) -> None:
    """All that can be told without knowing the model. Costs nothing that grows with the prompt but its length."""
    check_request_id(request.request_id)
    check_prompt(request, limits)
    _check_sampling(request, limits)
    _check_stop(request, limits)
    _within("n", request.n, 1, limits.choices)
    for name, value in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if value is not None:
            _within(name, value, 0, limits.logprobs)
    if request.timeout is not None and not request.timeout > 0:
        raise InvalidRequest.out_of_range("timeout", request.timeout, "must be above 0 seconds")
    _check_resume(request)


def check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID:
        raise InvalidRequest.out_of_range(
            "request_id", len(request_id), f"must have at most {MAX_REQUEST_ID} characters"
        )
    if any(not "!" <= character <= "~" for character in request_id):
        raise InvalidRequest.out_of_range("request_id", repr(request_id), "must hold visible ASCII characters only")


def check_prompt(request: GenerateRequest, limits: Limits) -> None:
    """Exactly one form of prompt, not empty, not over ``limits.prompt_bytes`` (checked before any tokenizing)."""
    forms = {"text": request.text, "prompt_token_ids": request.prompt_token_ids, "messages": request.messages}
    given = [name for name, value in forms.items() if value is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise InvalidRequest.out_of_range("prompt", got, f"must be exactly one of {', '.join(forms)}")
    if request.text is not None:
        _check_text("text", request.text, limits.prompt_bytes)
    elif request.prompt_token_ids is not None:
        ids = request.prompt_token_ids
        _check_size("prompt_token_ids", len(ids), 4 * len(ids), limits.prompt_bytes)
    else:
        _check_messages(request, limits)


def fit_max_tokens(request: GenerateRequest, prompt_tokens: int, card: ModelCard, limits: Limits) -> int:
    """The output tokens to allow. Raises InvalidRequest when prompt and answer do not fit the model's context."""
    room = card.context_length - prompt_tokens
    if room < 1:
        limit = f"must be below the context of {card.context_length} tokens of {card.model}"
        raise InvalidRequest.out_of_range("prompt", f"{prompt_tokens} tokens", limit)
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = max(min(limits.default_max_tokens, room), min(request.stop.min_tokens, room))
    if max_tokens > room:
        limit = f"prompt and max_tokens together must not exceed the context of {card.context_length} tokens"
        raise InvalidRequest.out_of_range("max_tokens", f"{prompt_tokens} + {max_tokens}", limit)
    if request.stop.min_tokens > max_tokens:
        raise InvalidRequest.out_of_range(
            "min_tokens", request.stop.min_tokens, f"must be at most max_tokens {max_tokens}"
        )
    for index, ids in enumerate(request.resume):
        if len(ids) > max_tokens:
            limit = f"must hold at most max_tokens {max_tokens} ids"
            raise InvalidRequest.out_of_range(f"resume[{index}]", len(ids), limit)
    return max_tokens


def check_token_ids(request: GenerateRequest, prompt: Sequence[int], card: ModelCard) -> None:
    """Every id that the request carries is one of the model's."""
    if not prompt:
        raise InvalidRequest.out_of_range("prompt", "0 tokens", "must hold at least 1 token")
    _check_ids("prompt_token_ids", prompt, card.vocab_size)
    _check_ids("stop_token_ids", request.stop.stop_token_ids, card.vocab_size)
    _check_ids("logit_bias", [token_id for token_id, _ in request.sampling.logit_bias], card.vocab_size)
    for index, ids in enumerate(request.resume):
        _check_ids(f"resume[{index}]", ids, card.vocab_size)


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        position, value = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise InvalidRequest.out_of_range(f"{field}[{position}]", value, f"must be between 0 and {vocab_size - 1}")


def _check_text(field: str, text: str, limit: int) -> None:
    # A character has one to four bytes, so only texts near the limit need to be encoded to know their size.
    size = len(text) if len(text) > limit else len(text.encode("utf-8", "surrogatepass"))
    _check_size(field, len(text), size, limit)


def _check_size(field: str, count: int, size: int, limit: int) -> None:
    if not count:
        raise InvalidRequest.out_of_range(field, "an empty prompt", "must not be empty")
    if size > limit:
        raise InvalidRequest.out_of_range(field, f"{size} bytes", f"must have at most {limit} bytes")


def _check_messages(request: GenerateRequest, limits: Limits) -> None:
    messages = request.messages or ()
    if not 1 <= len(messages) <= limits.messages:
        raise InvalidRequest.out_of_range("messages", len(messages), f"must hold 1 to {limits.messages} messages")
    size = 0
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest.out_of_range(
                f"messages[{index}].role", repr(message.role[:64]), f"must be one of {', '.join(ROLES)}"
            )
        size += len(message.content.encode("utf-8", "surrogatepass"))
        if size > limits.prompt_bytes:
            limit = f"must have at most {limits.prompt_bytes} bytes together"
            raise InvalidRequest.out_of_range(f"messages[{index}].content", f"{size} bytes", limit)


def _check_sampling(request: GenerateRequest, limits: Limits) -> None:
    sampling: Sampling = request.sampling
    _between("temperature", sampling.temperature, 0, 2)
    _between("top_p", sampling.top_p, 0, 1, open_low=True)
    _between("min_p", sampling.min_p, 0, 1)
    _between("repetition_penalty", sampling.repetition_penalty, 0, 10, open_low=True)
    _between("presence_penalty", sampling.presence_penalty, -2, 2)
    _between("frequency_penalty", sampling.frequency_penalty, -2, 2)
    _within("top_k", sampling.top_k, 0, 2**31 - 1)
    for seed in (sampling.seed, request.seed or 0):
        _within("seed", seed, 0, MAX_SEED)
    if len(sampling.logit_bias) > limits.logit_bias:
        limit = f"must hold at most {limits.logit_bias} entries"
        raise InvalidRequest.out_of_range("logit_bias", len(sampling.logit_bias), limit)
    for token_id, bias in sampling.logit_bias:
        _between(f"logit_bias[{token_id}]", bias, -100, 100)


def _check_stop(request: GenerateRequest, limits: Limits) -> None:
    stop: StopRules = request.stop
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidRequest.out_of_range("max_tokens", request.max_tokens, "must be at least 1")
    if stop.min_tokens < 0:
        raise InvalidRequest.out_of_range("min_tokens", stop.min_tokens, "must be at least 0")
    if request.max_tokens is not None and stop.min_tokens > request.max_tokens:
        limit = f"must be at most max_tokens {request.max_tokens}"
        raise InvalidRequest.out_of_range("min_tokens", stop.min_tokens, limit)
    if len(stop.stop_token_ids) > limits.stop_token_ids:
        limit = f"must hold at most {limits.stop_token_ids} ids"
        raise InvalidRequest.out_of_range("stop_token_ids", len(stop.stop_token_ids), limit)
    check_stop_strings(request.stop_strings)


def _check_resume(request: GenerateRequest) -> None:
    if len(request.resume) > request.n:
        raise InvalidRequest.out_of_range("resume", len(request.resume), f"must hold at most n {request.n} choices")
    if any(request.resume) and not request.request_id:
        raise InvalidRequest("request_id: must be set when resume is, got none", field="request_id")


def _within(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest.out_of_range(field, value, f"must be between {low} and {high}")


def _between(field: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    fits = math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
    if not fits:
        limit = f"must be above {low} and at most {high}" if open_low else f"must be between {low} and {high}"
        raise InvalidRequest.out_of_range(field, value, limit)
