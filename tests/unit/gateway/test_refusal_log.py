from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.core.clock import ManualClock
from baton.core.errors import QuotaExceeded, StateUnavailable
from baton.core.telemetry import SilentMeter
from baton.core.types import (
    Account,
    KeyRecord,
    Level,
    Metric,
    Organisation,
    QuotaClaim,
    QuotaRefusal,
    RefusalNote,
    Tenant,
)
from baton.state.refusals import MemoryRefusals
from gateway.refusal_log import WAITING, RefusalLog
from tests.unit.gateway.quota_doubles import PausedClock

ACCOUNT = Account(Organisation("umbrella"), Tenant("acme", "umbrella"), KeyRecord("k", "acme", "", ""))
REFUSED = QuotaExceeded.of([QuotaRefusal(Level.KEY, "k", "", Metric.CONCURRENCY, 1, 0, 1, 1, None)])


class Counted(SilentMeter):
    """One counter for all names."""

    def __init__(self) -> None:
        self.total = 0.0

    def counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Counted:
        return self

    def add(self, amount: float = 1.0, **labels: str) -> None:
        self.total += amount


def claim(request_id: str) -> QuotaClaim:
    return QuotaClaim(request_id, "", ACCOUNT, "m", 3, 4)


class LostRefusals(MemoryRefusals):
    is_away = True

    async def note(self, notes: Sequence[RefusalNote]) -> None:
        if self.is_away:
            raise StateUnavailable("away")
        await super().note(notes)


def test_a_refusal_is_written_a_moment_later_with_all_that_explains_it() -> None:
    async def body() -> None:
        refusals, clock = MemoryRefusals(), PausedClock(50.0)
        log = RefusalLog(refusals, clock, SilentMeter())
        async with log.written():
            log.note(claim("r1"), REFUSED)
            assert await refusals.find("acme", "r1") is None
            noted_at = clock.wall()
            async with asyncio.timeout(5):
                while await refusals.find("acme", "r1") is None:
                    clock.advance(0.05)
                    await asyncio.sleep(0)
        note = await refusals.find("acme", "r1")
        assert note == RefusalNote("r1", noted_at, "acme", "k", "m", 3, 4, REFUSED.refusals)

    asyncio.run(body())


def test_what_waits_is_written_at_the_end() -> None:
    async def body() -> None:
        refusals = MemoryRefusals()
        log = RefusalLog(refusals, PausedClock(50.0), SilentMeter())
        async with log.written():
            log.note(claim("r1"), REFUSED)
        assert await refusals.find("acme", "r1") is not None

    asyncio.run(body())


def test_an_outage_loses_notes_which_are_counted_and_ends_nothing() -> None:
    async def body() -> None:
        refusals, clock, lost = LostRefusals(), PausedClock(50.0), Counted()
        log = RefusalLog(refusals, clock, lost)
        async with log.written():
            log.note(claim("r1"), REFUSED)
            async with asyncio.timeout(5):
                while log._waiting:
                    clock.advance(0.05)
                    await asyncio.sleep(0)
            refusals.is_away = False
            log.note(claim("r2"), REFUSED)
        assert await refusals.find("acme", "r1") is None and await refusals.find("acme", "r2") is not None
        assert lost.total == 1

    asyncio.run(body())


def test_a_flood_is_bounded_its_newest_are_kept_and_the_others_counted() -> None:
    async def body() -> None:
        refusals, lost = MemoryRefusals(), Counted()
        log = RefusalLog(refusals, ManualClock(0.0), lost)
        for number in range(WAITING + 5):
            log.note(claim(f"r{number}"), REFUSED)
        assert len(log._waiting) == WAITING and lost.total == 5
        await log.write()
        assert await refusals.find("acme", f"r{WAITING + 4}") is not None

    asyncio.run(body())
