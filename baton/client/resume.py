"""Carrying one answer over lost connections: what is held of it, and how to ask for the rest. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.core.errors import PeerUnavailable
from baton.core.types import GenerateChunk, GenerateRequest, Placement, Usage


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """How often to go on after a lost connection, without a chunk in between; ``attempts`` 0: never.

    Every other gateway is asked at once and does not count. A request that has no chunk yet gives up after
    ``attempts_unanswered`` more: there is nothing to lose, and most likely nobody at the address. Pauses double from
    ``first_pause`` to ``longest_pause`` seconds.
    """

    attempts: int = 8
    attempts_unanswered: int = 2
    first_pause: float = 0.1
    longest_pause: float = 2.0

    def pause(self, failures: int, others: int, *, started: bool) -> float | None:
        """Seconds to wait after the ``failures``-th failure in a row (from 1); None: it was the last one.

        ``others``: gateways beside the one that was asked first. ``started``: a chunk was received.
        """
        if not self.attempts:
            return None
        if failures <= others:
            return 0.0
        again = failures - others
        if again > (self.attempts if started else min(self.attempts, self.attempts_unanswered)):
            return None
        return min(self.longest_pause, self.first_pause * 2 ** (again - 1))


@dataclass(slots=True)
class _Held:
    token_ids: tuple[int, ...] = ()
    finished: bool = False
    usage: Usage | None = None
    placement: Placement | None = None  # as the calls before this one left it
    migrations: int = 0
    placed_now: Placement | None = None
    migrated_now: int = 0


class HeldAnswer:
    """What the caller has been given of one request. Each token passes ``take`` once, whatever the number of calls."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._choices = [_Held() for _ in range(max(1, request.n))]
        for choice, token_ids in zip(self._choices, request.resume, strict=False):
            choice.token_ids = tuple(token_ids)
        self.started = False

    @property
    def complete(self) -> bool:
        return all(choice.finished for choice in self._choices)

    def rest(self, timeout: float | None) -> GenerateRequest:
        """The request for what is missing, with ``timeout`` seconds left."""
        for choice in self._choices:
            choice.placement, choice.migrations = _joined(choice), choice.migrations + choice.migrated_now
            choice.placed_now, choice.migrated_now = None, 0
        resume = tuple(choice.token_ids for choice in self._choices)
        return replace(self._request, resume=resume if any(resume) else (), timeout=timeout)

    def take(self, chunk: GenerateChunk) -> GenerateChunk | None:
        """The chunk as the caller should see it; None when the caller has it already."""
        if chunk.index >= len(self._choices):
            raise PeerUnavailable(f"the gateway sent choice {chunk.index} of {len(self._choices)}")
        choice = self._choices[chunk.index]
        if choice.finished:
            return None
        self.started = True
        choice.token_ids += chunk.token_ids
        choice.finished = chunk.finish is not None
        choice.placed_now = chunk.placement or choice.placed_now
        choice.migrated_now = chunk.migrations
        if chunk.usage is not None and choice.usage is None:
            choice.usage = chunk.usage
        return replace(
            chunk,
            usage=_usage(chunk, choice),
            placement=None if chunk.placement is None else _joined(choice),
            migrations=choice.migrations + chunk.migrations,
        )


def _usage(chunk: GenerateChunk, choice: _Held) -> Usage | None:
    """What the first call found cached stays true: a later one finds the request's own blocks, or none."""
    if chunk.usage is None or choice.usage is None:
        return None
    return replace(chunk.usage, cached_tokens=choice.usage.cached_tokens)


def _joined(choice: _Held) -> Placement | None:
    """Prefill as the first call had it, the latest decode worker, KV bytes of all."""
    before, now = choice.placement, choice.placed_now
    if before is None or now is None:
        return now or before
    return replace(before, decode_worker=now.decode_worker, kv_bytes=before.kv_bytes + now.kv_bytes)
