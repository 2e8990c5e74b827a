"""What one request of a load was answered, and whether that agrees with what it asked for and the engine counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.core.types import FinishReason, FirstToken, ModelCard, TokenChunk, TokenLogprob, TokenRequest, Usage


@dataclass(slots=True)
class LoadRecord:
    """All that came for ``request``, over every time its client came back."""

    request: TokenRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish: FinishReason | None = None
    usage: Usage | None = None
    chunks_after_the_last: int = 0

    def add(self, chunk: TokenChunk) -> None:
        self.chunks_after_the_last += self.finish is not None
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.prompt_logprobs += chunk.prompt_logprobs
        self.finish = chunk.finish or self.finish
        self.usage = chunk.usage or self.usage

    def add_first(self, first: FirstToken) -> None:
        """The first token of a prompt that was computed apart; ``finish`` comes with the stream."""
        self.token_ids.append(first.token_id)
        self.logprobs += () if first.logprob is None else (first.logprob,)
        self.prompt_logprobs += first.prompt_logprobs

    def faults(self, card: ModelCard) -> list[str]:
        """Where a finished answer contradicts itself, one line each."""
        name = self.request.request_id
        return [f"{name}: {fault}" for fault in (*self._counts(), *self._ends(card), *self._log_probabilities())]

    def _counts(self) -> Iterator[str]:
        came = len(self.token_ids)
        if self.chunks_after_the_last:
            yield f"{self.chunks_after_the_last} chunks came after the last one"
        if self.usage is None:
            yield "the last chunk has no usage"
            return
        if self.usage.prompt_tokens != len(self.request.prompt):
            yield f"usage counts {self.usage.prompt_tokens} prompt tokens, {len(self.request.prompt)} were sent"
        if self.usage.completion_tokens != came:
            yield f"the engine counted {self.usage.completion_tokens} tokens, {came} came"
        if self.usage.cached_tokens > self.usage.prompt_tokens:
            yield f"{self.usage.cached_tokens} of {self.usage.prompt_tokens} prompt tokens were cached"

    def _ends(self, card: ModelCard) -> Iterator[str]:
        rules = self.request.stop
        stops = {*rules.stop_token_ids, *(() if rules.ignore_eos else card.eos_token_ids)}
        came = self.token_ids
        first = next((index for index, token in enumerate(came) if token in stops), None)
        if not all(0 <= token < card.vocab_size for token in came):
            yield "a token is not in the vocabulary"
        if first is not None and first < rules.min_tokens:
            yield f"token {first} is a stop id, min_tokens is {rules.min_tokens}"
        if first is not None and first != len(came) - 1:
            yield f"token {first} of {len(came)} is a stop id"
        if (self.finish is FinishReason.STOP) != (first is not None):
            yield f"finish is {self.finish} and the {'first' if first is not None else 'missing'} stop id is {first}"
        if self.finish is FinishReason.LENGTH and len(came) != rules.max_tokens:
            yield f"finish is length after {len(came)} of {rules.max_tokens} tokens"
        if not 1 <= len(came) <= rules.max_tokens:
            yield f"{len(came)} tokens came, from 1 to {rules.max_tokens} were asked for"

    def _log_probabilities(self) -> Iterator[str]:
        wanted = self.request.logprobs
        if wanted is None and self.logprobs:
            yield f"{len(self.logprobs)} log-probabilities came unasked"
        if wanted is not None:
            if [entry.token_id for entry in self.logprobs] != self.token_ids:
                yield "the log-probabilities are not of the tokens that came"
            if any(len(entry.top) != wanted for entry in self.logprobs):
                yield f"a log-probability does not have the {wanted} likeliest alternatives"
        expected = 0 if self.request.prompt_logprobs is None else len(self.request.prompt)
        if len(self.prompt_logprobs) != expected:
            yield f"{len(self.prompt_logprobs)} prompt log-probabilities came, expected {expected}"
