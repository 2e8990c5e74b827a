"""One choice, from worker to worker until it is complete: placement, hops, exactly-once delivery."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from baton.core.api import DecodeApi, PlannerApi
from baton.core.clock import Clock
from baton.core.deadline import Deadline
from baton.core.errors import Expired, Overloaded, PeerUnavailable
from baton.core.streams import closing
from baton.core.telemetry import Counter, Meter
from baton.core.types import Candidate, DecodeRequest, FinishReason, GenerateChunk, Plan, PlanQuery, TokenChunk
from gateway.choice import ChoiceProgress
from gateway.fleet import FleetView

log = logging.getLogger(__name__)
RETRY_PAUSE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class RelayPolicy:
    """``lost_workers``: how many processes one choice may lose. ``patience``: seconds after a loss that it waits for
    another one, or for the lost one to come back."""

    lost_workers: int = 4
    patience: float = 5.0


class Relay:
    """Streams choices from decode workers; shared by all requests of the gateway."""

    def __init__(
        self,
        planner: PlannerApi,
        links: Callable[[Candidate], DecodeApi],
        fleet: FleetView,
        clock: Clock,
        meter: Meter,
        policy: RelayPolicy,
    ) -> None:
        self._planner = planner
        self._links = links
        self._fleet = fleet
        self._clock = clock
        self._policy = policy
        self._migrations: Counter = meter.counter("migrations", "Streams that went on after their worker was lost")

    async def stream(
        self, progress: ChoiceProgress, query: PlanQuery, deadline: Deadline, prefer: str = ""
    ) -> AsyncIterator[GenerateChunk]:
        """The choice's chunks, each token exactly once whatever happens to workers. ``prefer``: a worker to try first.

        Raises Overloaded when no worker takes it, PeerUnavailable when it lost too many, Expired at the deadline.
        """
        whole = progress.begin()
        if whole is not None:
            yield whole
            return
        route = _Route(self._planner, query, deadline, self._clock, self._policy, prefer)
        while progress.finish is None:
            worker = await route.next()
            whole = progress.lower(route.plan.limits.max_tokens)
            if whole is not None:
                yield whole
                return
            try:
                async with closing(self._attempt(progress, worker, route, deadline)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except Overloaded as error:
                route.refused(error)
            except Expired as error:
                raise deadline.explained(error) from error
            except PeerUnavailable as error:
                self._fleet.mark_down(worker)
                if route.lost(worker, error):
                    self._note_migration(progress, worker, error)

    async def _attempt(
        self, progress: ChoiceProgress, worker: Candidate, route: _Route, deadline: Deadline
    ) -> AsyncIterator[GenerateChunk]:
        plan = route.plan
        tokens = progress.next_hop(route.hop, deadline.remaining())
        tokens = replace(
            tokens,
            attention_window=plan.attention_window,
            speculation=tokens.speculation and plan.speculation,
            max_chunk_tokens=plan.limits.max_chunk_tokens,
            cache=plan.cache,
        )
        request = DecodeRequest(tokens, plan.prefill, plan.local_prefill_max_tokens, plan.prefill_wait)
        last: GenerateChunk | None = None
        with self._fleet.sending(worker.worker_id):
            async with closing(self._links(worker).generate(request)) as stream:
                while progress.finish is None:
                    deadline.check("the next token")
                    chunk = await deadline.within(_next(stream, worker), "the next token")
                    last = progress.accept(chunk)
                    if progress.finish is None and last is not None:
                        yield last
        if last is not None:
            yield last  # only after the worker was let go, so that a slow client holds no blocks

    def _note_migration(self, progress: ChoiceProgress, worker: Candidate, error: PeerUnavailable) -> None:
        self._migrations.add()
        progress.worker_lost()
        log.warning(
            "worker lost: its stream goes on elsewhere",
            extra={"worker": worker.worker_id, "tokens": len(progress.generated), "error": error.message},
        )


async def _next(stream: AsyncIterator[TokenChunk], worker: Candidate) -> TokenChunk:
    chunk = await anext(stream, None)
    if chunk is None or chunk.finish is FinishReason.CANCELLED:
        raise PeerUnavailable(f"worker {worker.worker_id} ended the stream before the answer was complete")
    return chunk


class _Route:
    """The workers to try for one choice, best first; asks for another plan when one is used up or a worker was lost."""

    def __init__(
        self,
        planner: PlannerApi,
        query: PlanQuery,
        deadline: Deadline,
        clock: Clock,
        policy: RelayPolicy,
        prefer: str,
    ) -> None:
        self._planner = planner
        self._query = query
        self._deadline = deadline
        self._clock = clock
        self._policy = policy
        self._prefer = prefer
        self._pending: deque[Candidate] = deque()
        self._refusals: list[Overloaded] = []
        self._lost: set[Candidate] = set()
        self._patient_until = 0.0  # meaningful once a worker was lost
        self.hop = -1
        self.plan = Plan((), (), 0)
        self._first: Plan | None = None

    async def next(self) -> Candidate:
        """The worker for the next hop. Raises Overloaded when every candidate refused and waiting is of no use."""
        while not self._pending:
            if self._refusals:
                await self._pause()
            await self._ask()
        self.hop += 1
        return self._pending.popleft()

    def refused(self, error: Overloaded) -> None:
        self._refusals.append(error)

    def lost(self, worker: Candidate, error: PeerUnavailable) -> bool:
        """Avoid ``worker`` from now on. False: this process was lost before, and is still not back.

        Raises ``error`` when too many were lost, or patience is at its end. A restarted worker counts anew, so that a
        request which kills its workers is stopped.
        """
        now = self._clock.now()
        is_new = worker not in self._lost
        if is_new:
            self._lost.add(worker)
            self._patient_until = now + self._policy.patience
        waited_enough = not is_new and now >= self._patient_until
        if waited_enough or len(self._lost) > self._policy.lost_workers:
            raise error
        self._query = replace(self._query, avoid=(*self._query.avoid, worker.worker_id))
        self._pending.clear()
        self._refusals.clear()
        return is_new

    async def _ask(self) -> None:
        query = replace(self._query, hop=self.hop + 1)
        try:
            plan = await self._deadline.within(self._planner.plan(query), "a plan")
        except Overloaded as error:
            self._refusals.append(error)
            return
        self._direct(plan)
        self._pending.extend(sorted(plan.decode, key=lambda candidate: candidate.worker_id != self._prefer))

    def _direct(self, plan: Plan) -> None:
        """Follow ``plan``. What the first one says of limits, cache and window holds for later hops."""
        if self._first is None:
            self._first = self.plan = plan
            limits, asked = plan.limits, self._query.max_tokens
            max_tokens = asked if limits.max_tokens is None else min(asked, limits.max_tokens)
            self._query = replace(self._query, attention_window=plan.attention_window, max_tokens=max_tokens)
            if limits.seconds is not None:
                self._deadline.limit(limits.seconds, f"the plan's time limit of {limits.seconds:g} s")
        else:
            self.plan = replace(plan, limits=self._first.limits, cache=self._first.cache)

    async def _pause(self) -> None:
        """A started answer waits a while for a worker, one that was lost and came back too; a new one does not."""
        if not self._lost or self._clock.now() >= self._patient_until:
            retry_after = min(error.retry_after for error in self._refusals)
            raise Overloaded(self._refusals[-1].message, retry_after=retry_after)
        self._refusals.clear()
        self._query = replace(self._query, avoid=())
        await self._deadline.within(self._clock.sleep(RETRY_PAUSE_SECONDS), "a worker to go on")
