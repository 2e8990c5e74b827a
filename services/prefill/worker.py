"""Computes prompts for decode workers: KV goes to the ticket's receiver, the first token back to the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from baton.core.api import EngineApi
from baton.core.clock import Clock
from baton.core.deadline import Deadline
from baton.core.errors import Busy, InvalidRequest, UnknownModel
from baton.core.telemetry import Meter
from baton.core.types import Candidate, PrefillRequest, PrefillResult
from services.kvtransfer.economy import FetchEconomy
from services.kvtransfer.fetcher import PrefixFetcher
from services.kvtransfer.prefill_run import until_first_token
from services.kvtransfer.sender import KvSender


class PrefillWorker:
    """Implements ``PrefillApi``. Everything that a call holds is tied to the call: nothing is pinned after it."""

    def __init__(
        self,
        engine: EngineApi,
        sender: KvSender,
        fetcher: PrefixFetcher,
        economy: FetchEconomy,
        me: Candidate,
        *,
        meter: Meter,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._sender = sender
        self._fetcher = fetcher
        self._economy = economy
        self._me = me
        self._clock = clock
        self._computing = 0
        told = "One prompt, from its arrival to its first token and the last confirmation"
        self._seconds = meter.histogram("prefill_seconds", told)
        self._declined = meter.counter("prefills_declined", "Prompts that would have had to wait for too long")

    @property
    def computing(self) -> int:
        """Prompts that the engine works on now: admitted, and without their first token."""
        return self._computing

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        self._check(request)
        self._require_time_for(request)
        began = self._clock.now()
        deadline = Deadline.after(request.tokens.timeout)
        result = await deadline.within(self._prefill(request), "prefill")
        self._seconds.observe(self._clock.now() - began)
        return result

    async def _prefill(self, request: PrefillRequest) -> PrefillResult:
        peering = await self._sender.connect(request.ticket)
        _check_skip(request, peering.receiver.format.block_size)
        found = self._fetcher.look_up(request.tokens)
        async with self._engine.prefill(request.tokens, None if found is None else 0) as run:
            if found is not None:
                await self._fetcher.fetch(found, run)
                run.start()
            began = self._clock.now()
            with self._counted():
                shipping = self._sender.ship(request.ticket, run, request.skip_blocks)
                kv_bytes, first = await until_first_token(run, shipping)
            self._economy.computed(request.tokens.context_tokens - run.cached_tokens, self._clock.now() - began)
        return PrefillResult(first, self._me.worker_id, kv_bytes)

    def _require_time_for(self, request: PrefillRequest) -> None:
        """Busy unless the prompts before it are computed within what the request may wait, as far as is known: those of
        lower tiers are none of them."""
        ahead, rate = self._engine.tokens_before(request.tokens.tier), self._engine.stats.prompt_tokens_per_second
        if request.max_wait is None or not rate or ahead / rate <= request.max_wait:
            return
        self._declined.add()
        done = (ahead + request.tokens.context_tokens) / rate
        raise Busy(
            f"{ahead} tokens are to be computed before, {ahead / rate:.3f} s; max_wait is {request.max_wait:g} s",
            retry_after=done,
        )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._computing += 1
        try:
            yield
        finally:
            self._computing -= 1

    def _check(self, request: PrefillRequest) -> None:
        tokens, ticket = request.tokens, request.ticket
        if tokens.model not in ("", self._engine.card.model):
            raise UnknownModel(f"model: this worker serves {self._engine.card.model}, got {tokens.model}")
        if (ticket.request_id, ticket.attempt) != (tokens.request_id, tokens.attempt):
            raise InvalidRequest(
                f"ticket: is for attempt {ticket.attempt} of {ticket.request_id}, "
                f"the request is attempt {tokens.attempt} of {tokens.request_id}",
                field="ticket",
            )


def _check_skip(request: PrefillRequest, block_size: int) -> None:
    """``block_size``: the receiver's, whose blocks are counted."""
    blocks = -(-request.tokens.context_tokens // block_size)
    if not 0 <= request.skip_blocks < max(1, blocks):
        raise InvalidRequest.out_of_range(
            "skip_blocks", request.skip_blocks, f"must be between 0 and {max(0, blocks - 1)}"
        )
