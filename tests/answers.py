"""Requests for tests, and what they yield put together so that two answers can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.core.types import (
    FinishReason,
    Placement,
    Sampling,
    StopRules,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    Usage,
)


@dataclass(frozen=True)
class Answer:
    """All that a request yielded, put together."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    placement: Placement | None = None

    def plus(self, chunk: TokenChunk) -> Answer:
        assert self.finish is None, "a chunk came after the last one"
        return Answer(
            self.token_ids + chunk.token_ids,
            self.logprobs + chunk.logprobs,
            self.prompt_logprobs + chunk.prompt_logprobs,
            chunk.finish,
            chunk.usage or self.usage,
            chunk.placement or self.placement,
        )

    @property
    def content(self) -> tuple[object, ...]:
        """What has to be equal wherever the request was computed."""
        return (self.token_ids, self.logprobs, self.prompt_logprobs, self.finish)


def tokens(
    length: int, *, request_id: str = "r", first: int = 3, max_tokens: int = 12, seed: int = 0, **fields: Any
) -> TokenRequest:
    """A request with a prompt of ``length`` ids that differ with ``first``. Greedy unless ``seed`` is given."""
    prompt = tuple((first + 7 * index) % 500 + 3 for index in range(length))
    sampling = Sampling(temperature=0.8, seed=seed) if seed else Sampling()
    stop = StopRules(max_tokens=max_tokens, ignore_eos=True)
    return TokenRequest(request_id, prompt, sampling=sampling, stop=fields.pop("stop", stop), **fields)
