"""Admission: a request's quota from before its first token to its settlement, with or without the shared counters.

While Redis is away each tenant's policy decides: ``bounded_local`` counts in this process against this gateway's share
of the limits, ``open`` admits, ``closed`` refuses. What was served meanwhile is charged to the shared counters when
they are back, before anybody is admitted by them again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace

from baton.core.background import background
from baton.core.clock import Clock, Ids
from baton.core.deadline import Deadline
from baton.core.errors import BatonError, Overloaded, PeerUnavailable, QuotaExceeded, StateUnavailable
from baton.core.telemetry import Meter
from baton.core.tenancy_api import QuotaApi
from baton.core.types import (
    NOTHING_DELIVERED,
    AwayPolicy,
    Delivered,
    LeaseState,
    QuotaClaim,
)
from gateway.delivery_log import DeliveryLog, DeliverySlot
from gateway.grant import Grant
from gateway.shadow import ShadowReport

log = logging.getLogger(__name__)

NOT_SERVED = (Overloaded, PeerUnavailable, StateUnavailable)  # ours to answer for, if nothing was delivered
RENEWED_AT_ONCE = 100  # leases that one call renews: a script holds up the server
MISSES_BEFORE_AWAY = 3  # one after the other; a single slow answer costs those that waited for it, and nobody else


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """``remember_seconds``: how long Redis knows an ended admission; a settlement that may have arrived is not sent
    again later than that.

    ``renew_seconds``: without a delivery log, what a gateway that dies has delivered after its last renewal is charged
    to nobody, unless the client resumes. ``kept_settlements``: how many may wait for Redis to come back; the oldest are
    lost beyond it.
    """

    lease_seconds: float = 15.0
    renew_seconds: float = 1.0
    expire_seconds: float = 10.0
    probe_seconds: float = 0.5
    remember_seconds: float = 600.0
    kept_settlements: int = 100_000


@dataclass(slots=True)
class _Ending:
    """A settlement, or without ``delivered`` a release, that Redis does not know of yet, or may not. ``slot`` is freed
    when it does."""

    claim: QuotaClaim
    delivered: Delivered | None
    slot: DeliverySlot | None = None
    first_tried: float | None = None

    def forget(self) -> None:
        if self.slot is not None:
            self.slot.free()


class Admission:
    def __init__(
        self,
        shared: QuotaApi,
        local: QuotaApi,
        *,
        clock: Clock,
        ids: Ids,
        meter: Meter,
        policy: AdmissionPolicy,
        deliveries: DeliveryLog | None = None,
    ) -> None:
        """``local`` counts in this process, by this gateway's share of the limits. ``shared`` answers within its own
        short budget or raises. Without ``deliveries`` only renewals tell what a gateway had delivered that is killed.
        """
        self._deliveries = deliveries
        self._shared = shared
        self._local = local
        self._clock = clock
        self._policy = policy
        self._name = f"{ids.epoch():016x}"
        self._admissions = 0
        self._misses = 0
        self._missed_at = clock.now()
        self._open: dict[str, Grant] = {}
        self._endings: deque[_Ending] = deque()
        self._ending_tasks: set[asyncio.Task[None]] = set()
        self._refusals = meter.counter("quota_refusals", "Claims refused, by the limit", ("level", "metric"))
        self._shadow = ShadowReport(meter)
        self._degraded_gauge = meter.gauge("quota_degraded", "1 while the shared counters are away")
        self._degraded = meter.counter("quota_degraded_admissions", "Admitted without the shared counters", ("policy",))
        self._lost = meter.counter("quota_settlements_lost", "Settlements given up while Redis was away")
        self._waiting = meter.gauge("quota_settlements_waiting", "Settlements that wait for Redis")
        self._renewals = meter.counter("quota_renewals", "Rounds in which all leases were renewed and progress told")
        self._degraded_gauge.set(0)

    @property
    def degraded(self) -> bool:
        """Whether the shared counters are away."""
        return self._misses >= MISSES_BEFORE_AWAY

    def why_degraded(self) -> str | None:
        """For whoever looks at the process; None while the shared counters decide."""
        return "quota counters are away" if self.degraded else None

    @property
    def waiting(self) -> int:
        """Settlements that Redis has to be told yet."""
        return len(self._endings)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Renew, expire and reconcile while the block lasts; at its end every settlement was told or tried."""
        try:
            async with (
                background(self._every(self._policy.renew_seconds, self._renew), "quota leases"),
                background(self._every(self._policy.expire_seconds, self._expire), "quota expiry"),
                background(self._every(self._policy.probe_seconds, self._reconcile), "quota reconciliation"),
            ):
                yield
        finally:
            await asyncio.gather(*self._ending_tasks)
            with suppress(StateUnavailable):
                await self._reconcile()

    @asynccontextmanager
    async def admitted(self, claim: QuotaClaim, deadline: Deadline) -> AsyncIterator[Grant]:
        """Reserve, run the block, settle what its grant was told; ``owner`` and lease of the claim are filled in here.

        QuotaExceeded when a limit is in the way; StateUnavailable when nobody can tell and the policy is ``closed``.
        When a later call takes the request over through another gateway, the next renewal cuts ``deadline``.
        The settlement goes on to its end even if the block was cancelled. A block that failed for want of capacity
        before anything was delivered is not charged at all.
        """
        self._admissions += 1
        owner = f"{self._name}-{self._admissions}"
        claim = replace(claim, owner=owner, lease_seconds=self._policy.lease_seconds)
        grant = await self._reserve(claim)
        grant.deadline = deadline
        self._open[owner] = grant
        served = True
        try:
            if self._deliveries is not None:
                grant.slot = self._deliveries.slot(claim)
            yield grant
        except NOT_SERVED:
            served = grant.delivered != NOTHING_DELIVERED
            raise
        finally:
            del self._open[owner]
            await self._end(grant, grant.delivered if served else None)

    # --- reserving --------------------------------------------------------------------------------------------------

    async def _reserve(self, claim: QuotaClaim) -> Grant:
        if self.degraded:
            return await self._reserve_without(claim)
        may_be_reserved = _Ending(claim, None)  # without our hearing of it
        try:
            with self._watched(), self._counted():
                answer = await self._shared.reserve(claim)
        except StateUnavailable:
            try:
                return await self._reserve_without(claim)
            except BatonError:
                self._keep(may_be_reserved)
                raise
        except asyncio.CancelledError:
            self._keep(may_be_reserved)
            raise
        self._shadow.note(answer.shadowed)
        return Grant(claim, answer.balances)

    async def _reserve_without(self, claim: QuotaClaim) -> Grant:
        tenant = claim.account.tenant
        grant = Grant(claim)
        grant.degraded = True
        if tenant.away is AwayPolicy.CLOSED:
            raise StateUnavailable(f"quota: the counters of tenant {tenant.name!r} are away, and its policy is closed")
        if tenant.away is AwayPolicy.BOUNDED_LOCAL:
            grant.is_local = True
            with self._counted():
                answer = await self._local.reserve(claim)
            self._shadow.note(answer.shadowed)
            grant.balances = answer.balances
        self._degraded.add(policy=tenant.away.value)
        return grant

    # --- ending -----------------------------------------------------------------------------------------------------

    async def _end(self, grant: Grant, delivered: Delivered | None) -> None:
        task = asyncio.create_task(self._tell(grant, delivered), name=f"settle {grant.claim.request_id}")
        self._ending_tasks.add(task)
        task.add_done_callback(self._ending_tasks.discard)
        await asyncio.shield(task)

    async def _tell(self, grant: Grant, delivered: Delivered | None) -> None:
        if grant.is_local:
            await _settle(self._local, grant.claim, delivered)
        ending = _Ending(grant.claim, delivered, grant.slot)
        if grant.degraded or self.degraded or not await self._told(ending):
            self._keep(ending)  # who waited for Redis in vain already waits no more

    async def _told(self, ending: _Ending) -> bool:
        if ending.first_tried is None:
            ending.first_tried = self._clock.now()
        try:
            with self._watched():
                await _settle(self._shared, ending.claim, ending.delivered)
        except StateUnavailable:
            return False
        ending.forget()
        return True

    def _keep(self, ending: _Ending) -> None:
        self._endings.append(ending)
        if len(self._endings) > self._policy.kept_settlements:
            self._give_up(self._endings.popleft(), "too many wait for Redis")
        self._waiting.set(len(self._endings))

    def _give_up(self, ending: _Ending, why: str) -> None:
        """Better a settlement lost than one counted twice: the lease ends and charges what was told before."""
        ending.forget()
        self._lost.add()
        log.warning("quota settlement given up: %s", why, extra={"request_id": ending.claim.request_id})

    # --- in the background ------------------------------------------------------------------------------------------

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._clock.sleep(seconds)
            with suppress(StateUnavailable):  # told by _watched; it is tried again
                await work()

    async def _renew(self) -> None:
        """Leases of requests in progress, one call for some of an organisation."""
        shared: dict[str, list[Grant]] = {}
        local: dict[str, list[Grant]] = {}
        for grant in self._open.values():
            kind = local if grant.is_local else shared
            kind.setdefault(grant.claim.account.organisation.name, []).append(grant)
        for organisation, grants in local.items():
            await self._local.renew(organisation, [g.progress() for g in grants], self._policy.lease_seconds)
        if self.degraded:
            return
        for organisation, grants in shared.items():
            for first in range(0, len(grants), RENEWED_AT_ONCE):
                await self._renew_shared(organisation, grants[first : first + RENEWED_AT_ONCE])
        self._renewals.add()

    async def _renew_shared(self, organisation: str, grants: Sequence[Grant]) -> None:
        with self._watched():
            told = [grant.progress() for grant in grants]
            states = await self._shared.renew(organisation, told, self._policy.lease_seconds)
        for grant, state in zip(grants, states, strict=True):
            if state is LeaseState.SUPERSEDED:
                grant.end_superseded()

    async def _expire(self) -> None:
        """Reservations of gateways that died. Each gateway looks; the first one finds."""
        await self._local.expire()
        if not self.degraded:
            with self._watched():
                await self._shared.expire()

    async def _reconcile(self) -> None:
        """Tell Redis what it missed. While it is away this is also what finds it back: no request waits for that."""
        if self.degraded:
            await self._shared.renew("probe", [], self._policy.lease_seconds)
        while self._endings:
            ending = self._endings.popleft()
            tried = ending.first_tried
            if tried is not None and self._clock.now() - tried > self._policy.remember_seconds:
                self._give_up(ending, "it may have arrived longer ago than Redis remembers")
            elif not await self._told_again(ending):
                break
            self._waiting.set(len(self._endings))
        if not self._endings:
            self._back()

    async def _told_again(self, ending: _Ending) -> bool:
        is_told = False
        try:
            is_told = await self._told(ending)
        finally:
            if not is_told:
                self._endings.appendleft(ending)
        return is_told

    # --- telling ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Around a call to the shared counters: what it says of whether they are away. One line a change."""
        started = self._clock.now()
        try:
            yield
        except StateUnavailable as error:
            if started < self._missed_at:
                raise  # the same miss: many wait for one answer
            self._misses, self._missed_at = self._misses + 1, self._clock.now()
            if self._misses == MISSES_BEFORE_AWAY:
                self._degraded_gauge.set(1)
                log.warning("quota counters are away, each tenant's policy decides", extra={"error": error.message})
            raise
        if not self.degraded:
            self._misses = 0

    def _back(self) -> None:
        if self.degraded:
            self._degraded_gauge.set(0)
            log.info("quota counters are back")
        self._misses = 0

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except QuotaExceeded as error:
            for refusal in error.refusals:
                self._refusals.add(level=refusal.level, metric=refusal.metric)
            raise


async def _settle(quota: QuotaApi, claim: QuotaClaim, delivered: Delivered | None) -> None:
    if delivered is None:
        await quota.release(claim)
    else:
        await quota.settle(claim, delivered)
