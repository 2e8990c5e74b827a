"""Owns a request from its admission to its last token: reserve, have the prompt computed, stream the answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import count

from baton.core.api import EngineApi, PrefillApi, Reservation
from baton.core.clock import Clock
from baton.core.deadline import Deadline
from baton.core.errors import BatonError, Busy, Expired, InvalidRequest, PeerUnavailable, UnknownModel
from baton.core.streams import closing
from baton.core.telemetry import Meter
from baton.core.types import (
    Attempt,
    Candidate,
    DecodeRequest,
    FirstToken,
    Placement,
    PrefillMode,
    PrefillRequest,
    PrefillResult,
    TokenChunk,
)
from services.decode.balance import is_sooner_here
from services.kvtransfer.circuit import Circuit
from services.kvtransfer.economy import FetchEconomy
from services.kvtransfer.fetcher import PrefixFetcher
from services.kvtransfer.receiver import KvReceiver

log = logging.getLogger(__name__)

# What another worker would answer too. Anything else is the peer's own trouble: gone, full, shutting down, broken,
# another process at its old address.
THE_REQUESTS_OWN = (InvalidRequest, Expired)


@dataclass(frozen=True, slots=True)
class _Go:
    """One request with what its helpers need."""

    request: DecodeRequest
    reservation: Reservation
    deadline: Deadline


class DecodeWorker:
    """Implements ``DecodeApi``.

    Whatever happens, closing or abandoning ``generate`` closes the ticket, cancels the prefill and returns the blocks:
    each is an ``async with`` of the one generator. ``usage.cached_tokens`` counts the prompt tokens that no worker
    computed for this request: the prefix hits of the engine that computed the rest. Hits of this worker's own cache
    save the shipping of blocks but not their computation by a prefill worker, so in the split path they do not count.
    """

    def __init__(
        self,
        engine: EngineApi,
        receiver: KvReceiver,
        fetcher: PrefixFetcher,
        economy: FetchEconomy,
        prefill_peers: Callable[[Candidate], PrefillApi],
        me: Candidate,
        *,
        peer_rest_seconds: float,
        meter: Meter,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._fetcher = fetcher
        self._economy = economy
        self._prefill_peers = prefill_peers
        self._me = me
        self._clock = clock
        self._circuit = Circuit(clock, peer_rest_seconds)
        self._computing = 0
        self._ttft = meter.histogram(
            "worker_time_to_first_token_seconds",
            "From a request's arrival at this worker to its first token",
            ("mode",),
        )
        self._itl = meter.histogram("inter_token_latency_seconds", "Gaps between chunks of one answer")
        self._retries = meter.counter("prefill_attempts_failed", "Prefill candidates given up", ("cause",))
        self._local = meter.counter("local_prefills", "Prompts computed by this decode worker itself", ("reason",))

    @property
    def computing(self) -> int:
        """Requests that the engine works on now: not those that wait for a place or for a remote prefill."""
        return self._computing

    async def generate(self, request: DecodeRequest) -> AsyncIterator[TokenChunk]:
        tokens = request.tokens
        if tokens.model not in ("", self._engine.card.model):
            raise UnknownModel(f"model: this worker serves {self._engine.card.model}, got {tokens.model}")
        last = self._clock.now()
        deadline = Deadline.after(tokens.timeout)
        async with AsyncExitStack() as stack:
            found = self._fetcher.look_up(tokens)
            begin = _computed_here(request) if found is None else 0
            reservation = await deadline.within(
                stack.enter_async_context(self._engine.reserve(tokens, begin)), "a place on this decode worker"
            )
            if found is not None:
                await deadline.within(self._fetcher.fetch(found, reservation), "blocks from the cache tier")
            go = _Go(request, reservation, deadline)
            handed = await self._prefill_remotely(go)
            began = self._clock.now()
            async with closing(self._answer(go, handed)) as answer:
                mode = PrefillMode.LOCAL if handed is None else PrefillMode.REMOTE
                async for chunk in answer:
                    now = self._clock.now()
                    if chunk.placement is not None:
                        self._ttft.observe(now - last, mode=mode.value)
                        if handed is None:
                            self._economy.computed(tokens.context_tokens - reservation.cached_tokens, now - began)
                    else:
                        self._itl.observe(now - last)
                    last = now
                    yield chunk

    async def _answer(self, go: _Go, handed: PrefillResult | None) -> AsyncIterator[TokenChunk]:
        """The chunks of the answer; the first one carries the placement."""
        placement: Placement | None = self._placement(handed)
        first = None if handed is None else handed.first
        if first is not None:
            yield replace(_first_chunk(first), placement=placement)
            placement = None
            if first.finish is not None:
                return
        async with closing(self._computed(go.reservation, first)) as stream:
            while (chunk := await go.deadline.within(anext(stream, None), "the next token")) is not None:
                yield chunk if placement is None else replace(chunk, placement=placement)
                placement = None

    async def _computed(self, reservation: Reservation, first: FirstToken | None) -> AsyncIterator[TokenChunk]:
        """What the engine streams, counted as its work for as long as it does."""
        self._computing += 1
        try:
            async with closing(reservation.decode(first)) as stream:
                async for chunk in stream:
                    yield chunk
        finally:
            self._computing -= 1

    # --- the prompt, somewhere else -----------------------------------------------------------------------------------

    async def _prefill_remotely(self, go: _Go) -> PrefillResult | None:
        """The result of the first candidate that succeeds, its blocks valid here; None: compute the prompt here.

        Candidates are asked twice if need be: who has no time for it soon, and then, unless this worker is sooner, how
        soon they ever may.
        """
        uncached = go.request.tokens.context_tokens - go.reservation.cached_tokens
        if uncached <= go.request.local_prefill_max_tokens:
            return self._stay_local("short")
        if not go.request.prefill:
            return self._stay_local("no_candidate")
        busy: dict[Candidate, float] = {}  # seconds until each would have computed it
        attempts = _attempts(go.request)
        handed = await self._first_of(go, go.request.prefill, attempts, go.request.prefill_wait, busy)
        if handed is None and busy:
            soonest = sorted(busy, key=lambda candidate: busy[candidate])
            if is_sooner_here(self._engine.stats, go.request.tokens.tier, uncached, busy[soonest[0]]):
                return self._stay_local("balance")
            handed = await self._first_of(go, soonest, attempts, None, busy)
        return handed or self._stay_local("candidates_failed")

    async def _first_of(
        self,
        go: _Go,
        candidates: Sequence[Candidate],
        attempts: Iterator[Attempt],
        max_wait: float | None,
        busy: dict[Candidate, float],
    ) -> PrefillResult | None:
        """The first success; None without any. Those that would need too long are noted in ``busy``."""
        for candidate in candidates:
            if candidate.worker_id == self._me.worker_id or self._circuit.is_open(candidate):
                continue
            attempt = self._receiver.fresh(go.request.tokens.request_id, next(attempts))
            try:
                return await self._hand_over(go, candidate, attempt, max_wait)
            except THE_REQUESTS_OWN:
                raise
            except Busy as error:
                busy[candidate] = error.retry_after
            except BatonError as error:
                self._note_failure(go, candidate, error)
        return None

    def _note_failure(self, go: _Go, candidate: Candidate, error: BatonError) -> None:
        self._retries.add(cause=error.reason)
        details = {"request_id": go.request.tokens.request_id, "peer": candidate.worker_id}
        log.warning("prefill attempt failed", extra={**details, "cause": error.reason, "error": error.message})
        if isinstance(error, PeerUnavailable):
            self._circuit.trip(candidate, error.message)

    async def _hand_over(
        self, go: _Go, candidate: Candidate, attempt: Attempt, max_wait: float | None
    ) -> PrefillResult:
        tokens = go.request.tokens
        skip = go.reservation.cached_tokens // self._engine.card.format.block_size
        async with self._receiver.accept(
            tokens.request_id, attempt, go.reservation, skip_blocks=skip, context_tokens=tokens.context_tokens
        ) as delivery:
            sent = replace(tokens, attempt=attempt, timeout=go.deadline.remaining())
            call = self._prefill_peers(candidate).prefill(PrefillRequest(sent, delivery.ticket, skip, max_wait))
            result = await go.deadline.within(call, f"prefill by {candidate.worker_id}")
            self._receiver.require_complete(delivery)
            return replace(result, kv_bytes=delivery.bytes_received)

    def _stay_local(self, reason: str) -> None:
        self._local.add(reason=reason)

    def _placement(self, handed: PrefillResult | None) -> Placement:
        me = self._me.worker_id
        if handed is None:
            return Placement(me, me, PrefillMode.LOCAL, 0)
        return Placement(me, handed.worker_id, PrefillMode.REMOTE, handed.kv_bytes)


def _attempts(request: DecodeRequest) -> Iterator[Attempt]:
    """One for each time that a candidate is asked; retry 0 is the computation on this worker."""
    hop, retry = request.tokens.attempt.hop, request.tokens.attempt.retry
    return (Attempt(hop, number) for number in count(retry + 1))


def _computed_here(request: DecodeRequest) -> int:
    """Up to how many uncached tokens the prompt is computed by this worker whatever happens."""
    return request.local_prefill_max_tokens if request.prefill else request.tokens.context_tokens


def _first_chunk(first: FirstToken) -> TokenChunk:
    return TokenChunk(
        token_ids=(first.token_id,),
        logprobs=() if first.logprob is None else (first.logprob,),
        prompt_logprobs=first.prompt_logprobs,
        finish=first.finish,
        usage=first.usage,
    )
