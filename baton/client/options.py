"""The keyword arguments of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

from baton.core.types import ChatMessage, GenerateRequest, Sampling, StopRules


class Options(TypedDict, total=False):
    """What may be said of a request beside its prompt. Absent: the gateway's default, which for sampling is greedy.

    ``timeout`` is in seconds, for the whole answer. ``request_id`` makes the call idempotent: a second call with the
    same id takes the request over.
    """

    model: str
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    n: int
    logprobs: int
    prompt_logprobs: int
    request_id: str
    timeout: float


def build_request(
    *,
    text: str | None = None,
    prompt_token_ids: Sequence[int] | None = None,
    messages: Sequence[ChatMessage] | None = None,
    **options: Unpack[Options],
) -> GenerateRequest:
    """The request that the keyword arguments describe."""
    default = Sampling()
    sampling = Sampling(
        temperature=options.get("temperature", default.temperature),
        top_k=options.get("top_k", default.top_k),
        top_p=options.get("top_p", default.top_p),
        min_p=options.get("min_p", default.min_p),
        repetition_penalty=options.get("repetition_penalty", default.repetition_penalty),
        presence_penalty=options.get("presence_penalty", default.presence_penalty),
        frequency_penalty=options.get("frequency_penalty", default.frequency_penalty),
        logit_bias=tuple(options.get("logit_bias", {}).items()),
    )
    stop = StopRules(
        min_tokens=options.get("min_tokens", 0),
        stop_token_ids=tuple(options.get("stop_token_ids", ())),
        ignore_eos=options.get("ignore_eos", False),
    )
    return GenerateRequest(
        model=options.get("model", ""),
        text=text,
        prompt_token_ids=None if prompt_token_ids is None else tuple(prompt_token_ids),
        messages=None if messages is None else tuple(messages),
        sampling=sampling,
        seed=options.get("seed"),
        stop=stop,
        max_tokens=options.get("max_tokens"),
        stop_strings=tuple(options.get("stop", ())),
        n=options.get("n", 1),
        logprobs=options.get("logprobs"),
        prompt_logprobs=options.get("prompt_logprobs"),
        request_id=options.get("request_id", ""),
        timeout=options.get("timeout"),
    )
