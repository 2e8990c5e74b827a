"""Quotas that go away and come back, and a clock on which background work waits for the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from baton.core.clock import CountingIds, ManualClock
from baton.core.deadline import Deadline
from baton.core.errors import StateUnavailable
from baton.core.telemetry import Meter, SilentMeter
from baton.core.types import (
    Account,
    AwayPolicy,
    Delivered,
    KeyRecord,
    LeaseState,
    LedgerEntry,
    Limits,
    Organisation,
    Prices,
    Progress,
    QuotaBalance,
    QuotaClaim,
    QuotaGrant,
    SettleOutcome,
    Tenant,
)
from baton.state.quota.local_share import LocalShare
from baton.state.quota.memory import MemoryQuota
from gateway.admission import Admission, AdmissionPolicy
from gateway.delivery_log import DeliveryLog
from gateway.grant import Grant

TURNS = 50  # of the event loop: enough for whatever is due to be done


class PausedClock(ManualClock):
    """``sleep`` ends when the test has moved the clock far enough."""

    async def sleep(self, seconds: float) -> None:
        end = self.now() + seconds
        while self.now() < end:
            await asyncio.sleep(0)


class UnsteadyQuota:
    """A quota behind a bad line. ``is_away``: nothing arrives; ``is_deaf``: everything arrives, no answer comes back.
    Calls wait until it is ``thawed``."""

    def __init__(self, quota: MemoryQuota) -> None:
        self._quota = quota
        self.is_away = False
        self.is_deaf = False
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.calls = 0

    async def _before(self) -> None:
        self.calls += 1
        await self.thawed.wait()
        if self.is_away:
            raise StateUnavailable("away")

    async def reserve(self, claim: QuotaClaim) -> QuotaGrant:
        await self._before()
        answer = await self._quota.reserve(claim)
        self._unheard()
        return answer

    async def renew(self, organisation: str, progress: Sequence[Progress], lease_seconds: float) -> list[LeaseState]:
        await self._before()
        answer = await self._quota.renew(organisation, progress, lease_seconds)
        self._unheard()
        return answer

    async def settle(self, claim: QuotaClaim, delivered: Delivered) -> SettleOutcome:
        await self._before()
        answer = await self._quota.settle(claim, delivered)
        self._unheard()
        return answer

    async def release(self, claim: QuotaClaim) -> SettleOutcome:
        await self._before()
        answer = await self._quota.release(claim)
        self._unheard()
        return answer

    async def expire(self) -> int:
        await self._before()
        return await self._quota.expire()

    async def recover(self, organisation: str, progress: Sequence[Progress]) -> int:
        await self._before()
        answer = await self._quota.recover(organisation, progress)
        self._unheard()
        return answer

    async def balances(self, account: Account, model: str) -> tuple[QuotaBalance, ...]:
        await self._before()
        return await self._quota.balances(account, model)

    def _unheard(self) -> None:
        if self.is_deaf:
            raise StateUnavailable("no answer")


class Gate:
    """A gateway's admission over a quota that the test may take away."""

    def __init__(
        self,
        policy: AdmissionPolicy,
        quota: MemoryQuota | None = None,
        clock: PausedClock | None = None,
        meter: Meter | None = None,
        replicas: int = 1,
        deliveries: DeliveryLog | None = None,
    ) -> None:
        self.clock = clock or PausedClock(1000.0)
        self.books = quota or MemoryQuota(self.clock)
        self.shared = UnsteadyQuota(self.books)
        self.local = MemoryQuota(self.clock, kept_entries=100, terms=LocalShare(lambda: replicas).of)
        self.admission = Admission(
            self.shared,
            self.local,
            clock=self.clock,
            ids=CountingIds(),
            meter=meter or SilentMeter(),
            policy=policy,
            deliveries=deliveries,
        )

    def admitted(self, claim: QuotaClaim, deadline: Deadline | None = None) -> AbstractAsyncContextManager[Grant]:
        return self.admission.admitted(claim, deadline or Deadline(None))

    async def pass_time(self, seconds: float) -> None:
        """Move the clock in small steps and let background work do what is due."""
        for _ in range(round(seconds * 2)):
            self.clock.advance(0.5)
            for _ in range(TURNS):
                await asyncio.sleep(0)

    async def lose(self) -> None:
        """Take Redis away, and let the gateway notice."""
        self.shared.is_away = True
        for number in range(3):
            async with self.admitted(claim(f"lost-{number}", tenant="nobody", away=AwayPolicy.OPEN)):
                pass
        assert self.admission.degraded

    async def ledger(self) -> list[LedgerEntry]:
        """Without what ``lose`` asked for."""
        return [entry for entry in await self.books.entries("umbrella") if entry.tenant != "nobody"]

    async def reserved(self) -> int:
        account = claim("", tenant="acme").account
        return sum(balance.reserved for balance in await self.books.balances(account, "m"))


@asynccontextmanager
async def gate(
    policy: AdmissionPolicy | None = None, meter: Meter | None = None, replicas: int = 1
) -> AsyncIterator[Gate]:
    built = Gate(policy or AdmissionPolicy(), meter=meter, replicas=replicas)
    async with built.admission.running():
        yield built


def claim(
    request_id: str,
    limits: Limits | None = None,
    *,
    tenant: str = "acme",
    away: AwayPolicy = AwayPolicy.BOUNDED_LOCAL,
    tokens: tuple[int, int] = (10, 20),
) -> QuotaClaim:
    account = Account(
        Organisation("umbrella"),
        Tenant(tenant, "umbrella", limits=limits or Limits(), away=away),
        KeyRecord(f"key-{tenant}", tenant, "key.abcd", "00"),
    )
    return QuotaClaim(request_id, "", account, "m", *tokens, prices=Prices(1, 1, 1))
