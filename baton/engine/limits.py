"""What one engine can serve at all: checked once, when a request is submitted. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from baton.core.errors import InvalidRequest
from baton.core.types import ModelCard, Module, TokenRequest


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request is measured against: the model and the size of the pool."""

    card: ModelCard
    total_blocks: int

    def check(self, request: TokenRequest) -> None:
        """Refuse what can never be served. InvalidRequest names field, limit and value.

        It guarantees that a request fits the pool alone to its last token, so that it always ends.
        """
        self._check_ids("prompt", request.prompt)
        self._check_ids("generated", request.generated)
        self._check_ids("stop_token_ids", request.stop.stop_token_ids)
        self._check_ids("logit_bias", [token for token, _ in request.sampling.logit_bias])
        if not request.prompt:
            raise InvalidRequest.out_of_range("prompt", "no tokens", "needs at least one token")
        self._check_lengths(request)
        for name, count in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
            if count is not None and not 0 <= count <= self.card.vocab_size:
                raise InvalidRequest.out_of_range(name, count, f"must be between 0 and {self.card.vocab_size}")
        _check_sampling(request)
        _check_directives(request)
        if request.attention_window is not None:
            self._check_window(request.attention_window)

    def _check_window(self, window: int) -> None:
        name, modules = Module.ATTENTION_WINDOW, self.card.modules
        if name not in modules:
            has = f"it has {', '.join(modules)}" if modules else "it has none"
            raise InvalidRequest(f"{name}: this worker has no module {name}; {has}", field=name)
        if not 1 <= window <= self.card.context_length:
            raise InvalidRequest.out_of_range(name, window, f"must be between 1 and {self.card.context_length}")

    def _check_ids(self, name: str, ids: Tokens[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.card.vocab_size):
            value = next(token for token in ids if not 0 <= token < self.card.vocab_size)
            raise InvalidRequest.out_of_range(
                name, value, f"token ids must be between 0 and {self.card.vocab_size - 1}"
            )

    def _check_lengths(self, request: TokenRequest) -> None:
        stop = request.stop
        if stop.max_tokens < 1:
            raise InvalidRequest.out_of_range("max_tokens", stop.max_tokens, "must be at least 1")
        if not 0 <= stop.min_tokens <= stop.max_tokens:
            raise InvalidRequest.out_of_range(
                "min_tokens", stop.min_tokens, f"must be between 0 and max_tokens ({stop.max_tokens})"
            )
        if len(request.generated) >= stop.max_tokens:
            raise InvalidRequest.out_of_range(
                "generated", f"{len(request.generated)} tokens", f"must be fewer than max_tokens ({stop.max_tokens})"
            )
        total = len(request.prompt) + stop.max_tokens
        pool_tokens = self.total_blocks * self.card.format.block_size
        for limit, name in ((self.card.context_length, "the context length"), (pool_tokens, "the KV pool")):
            if total > limit:
                raise InvalidRequest.out_of_range(
                    "prompt",
                    f"{len(request.prompt)} + {stop.max_tokens} = {total}",
                    f"prompt tokens + max_tokens must be at most {limit} ({name})",
                )


def _check_directives(request: TokenRequest) -> None:
    keep = request.cache.keep_tokens
    for name in ("max_chunk_tokens", "tenant_max_blocks"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise InvalidRequest.out_of_range(name, value, "must be at least 1")
    if keep < 0:
        raise InvalidRequest.out_of_range("keep_tokens", keep, "must not be negative")


def _check_sampling(request: TokenRequest) -> None:
    sampling = request.sampling
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if not math.isfinite(value):
            raise InvalidRequest.out_of_range(name, value, "must be a finite number")
    if sampling.temperature < 0:
        raise InvalidRequest.out_of_range("temperature", sampling.temperature, "must not be negative")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest.out_of_range("top_p", sampling.top_p, "must be above 0 and at most 1")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequest.out_of_range("min_p", sampling.min_p, "must be between 0 and 1")
    if sampling.top_k < 0:
        raise InvalidRequest.out_of_range("top_k", sampling.top_k, "must not be negative")
    if sampling.repetition_penalty <= 0:
        raise InvalidRequest.out_of_range("repetition_penalty", sampling.repetition_penalty, "must be above 0")
    for token, bias in sampling.logit_bias:
        if not math.isfinite(bias):
            raise InvalidRequest.out_of_range("logit_bias", f"{token}: {bias}", "must be a finite number")
