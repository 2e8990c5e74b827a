"""One choice of an answer: what has been received of it, and what the client is told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.core.types import (
    Attempt,
    FinishReason,
    GenerateChunk,
    Placement,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    Usage,
)
from baton.text.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class ChoiceOrder:
    """What one choice is asked to be. ``tokens`` is the request of its first hop; ``eos`` ends it too (empty: none).

    ``request_id`` is the client's; workers know each choice by one of its own.
    """

    request_id: str
    index: int
    tokens: TokenRequest
    eos: frozenset[int]


class ChoiceProgress:
    """Folds the chunks of any number of hops into one stream without gap or duplicate.

    A chunk's ids, log-probabilities and text leave together, so whoever holds the ids of a prefix of the stream holds
    exactly its text, and may continue from there (``resumed``).
    """

    def __init__(self, order: ChoiceOrder, text: TextStream | None, resumed: Sequence[int] = ()) -> None:
        self._order = order
        self._text = text
        self._generated = list(resumed)
        self._ends = order.eos | frozenset(order.tokens.stop.stop_token_ids)
        self._usage: Usage | None = None
        self._placement: Placement | None = None
        self._limit = ""  # of the plan, where it is lower than the request's own
        self._prompt_logprobs_due = order.tokens.prompt_logprobs is not None and not resumed
        self.migrations = 0
        self.finish: FinishReason | None = None
        self._news = True  # usage and placement are told when they are new
        if text is not None:
            text.replay(resumed)

    @property
    def index(self) -> int:
        return self._order.index

    @property
    def generated(self) -> tuple[int, ...]:
        """The output ids received so far, those of earlier hops included."""
        return tuple(self._generated)

    @property
    def decode_worker(self) -> str:
        return self._placement.decode_worker if self._placement else ""

    def next_hop(self, hop: int, timeout: float | None) -> TokenRequest:
        """What to ask the next worker for: the same request, from where the stream stands."""
        tokens = self._order.tokens
        return replace(
            tokens,
            attempt=Attempt(hop),
            generated=self.generated,
            prompt_logprobs=tokens.prompt_logprobs if self._prompt_logprobs_due else None,
            timeout=timeout,
        )

    def begin(self) -> GenerateChunk | None:
        """The last chunk, if the resumed ids are the whole answer already."""
        finish = self._ended() if self._generated else None
        return self._conclude(finish, TokenChunk(), "") if finish is not None else None

    def lower(self, max_tokens: int | None) -> GenerateChunk | None:
        """The plan allows no more output tokens than this. Returns the last chunk if the ids received are a whole
        answer by that."""
        tokens = self._order.tokens
        if max_tokens is None or max_tokens >= tokens.stop.max_tokens:
            return None
        stop = replace(tokens.stop, max_tokens=max_tokens, min_tokens=min(tokens.stop.min_tokens, max_tokens))
        self._order = replace(self._order, tokens=replace(tokens, stop=stop))
        self._limit = "max_tokens"
        return self.begin()

    def worker_lost(self) -> None:
        self.migrations += 1

    def accept(self, chunk: TokenChunk) -> GenerateChunk | None:
        """Take in what a worker sent; returns what to tell the client, None when nothing is new for it.

        Sets ``finish`` with the last chunk. Ids after a completed stop string or after ``max_tokens`` are dropped.
        """
        self._note(chunk)
        room = self._order.tokens.stop.max_tokens - len(self._generated)
        kept, text = chunk.token_ids[:room], ""
        if self._text is not None:
            delta = self._text.extend(kept)
            kept, text = kept[: delta.tokens], delta.text
        self._generated += kept
        chunk = replace(chunk, token_ids=kept, logprobs=chunk.logprobs[: len(kept)])
        finish = self._ended() if kept else None
        if (finish := finish or chunk.finish) is not None:
            return self._conclude(finish, chunk, text)
        return self._tell(chunk, text) if kept or text or chunk.prompt_logprobs else None

    def _note(self, chunk: TokenChunk) -> None:
        if chunk.usage is not None and self._usage is None:
            self._usage = chunk.usage
        if chunk.placement is not None:
            self._placement = _continued(self._placement, chunk.placement)
            self._news = True

    def _ended(self) -> FinishReason | None:
        """Whether the ids received so far are a whole answer."""
        if self._text is not None and self._text.stop_matched is not None:
            return FinishReason.STOP
        stop = self._order.tokens.stop
        if self._generated[-1] in self._ends and len(self._generated) > stop.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self._generated) >= stop.max_tokens else None

    def _conclude(self, finish: FinishReason, chunk: TokenChunk, text: str) -> GenerateChunk:
        if self._text is not None and self._text.stop_matched is None:
            rest = self._text.finish()
            text += rest.text
            finish = FinishReason.STOP if rest.stop_matched is not None else finish
        self.finish = finish
        self._news = True
        return self._tell(replace(chunk, finish=finish), text)

    def _tell(self, chunk: TokenChunk, text: str) -> GenerateChunk:
        news, self._news = self._news, False
        return GenerateChunk(
            request_id=self._order.request_id,
            index=self._order.index,
            text=text,
            token_ids=chunk.token_ids,
            logprobs=chunk.logprobs,
            prompt_logprobs=self._prompt_logprobs(chunk),
            finish=chunk.finish,
            usage=self._usage_so_far() if news else None,
            placement=self._placement if news else None,
            migrations=self.migrations,
            limit=self._limit if chunk.finish is FinishReason.LENGTH else "",
        )

    def _prompt_logprobs(self, chunk: TokenChunk) -> tuple[TokenLogprob | None, ...]:
        due, self._prompt_logprobs_due = self._prompt_logprobs_due, False
        return chunk.prompt_logprobs if due else ()

    def _usage_so_far(self) -> Usage:
        """The first hop's truth about the prompt: a later hop finds its own blocks cached, or none."""
        cached = self._usage.cached_tokens if self._usage else 0
        return Usage(len(self._order.tokens.prompt), cached, len(self._generated))


def _continued(before: Placement | None, now: Placement) -> Placement:
    """Prefill as the first hop had it, the decode worker of the latest, KV bytes of all."""
    if before is None:
        return now
    return replace(before, decode_worker=now.decode_worker, kv_bytes=before.kv_bytes + now.kv_bytes)
