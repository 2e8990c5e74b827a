"""Usage ledgers looked after: archived by whichever gateway, trimmed behind that, and whole to those who read them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from baton.core.errors import NotFound, StateUnavailable
from baton.core.telemetry import Counter, Gauge, SilentMeter
from baton.core.tenancy_api import LedgerArchive, LedgerReader
from baton.core.types import Delivered, LedgerEntry, LedgerExtent
from baton.state.quota.archived_ledger import ArchivedLedger
from baton.state.quota.ledger_files import LedgerFiles
from baton.state.quota.memory import MemoryQuota
from gateway.ledger_upkeep import LedgerPolicy, LedgerUpkeep
from tests.unit.gateway.quota_doubles import PausedClock, claim

NOON = 1_764_417_600.0  # 2025-11-29 12:00:00 UTC
DAY = 86_400.0


class Recorder(SilentMeter):
    """``values``: what each counter and gauge stands at."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
        return Recorded(name, self.values)

    def gauge(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Recorded(name, self.values)


@dataclass
class Recorded:
    name: str
    values: dict[str, float]

    def add(self, amount: float = 1.0, **labels: str) -> None:
        self.values[self.name] = self.values.get(self.name, 0) + amount

    def set(self, value: float, **labels: str) -> None:
        self.values[self.name] = value


class World:
    """A ledger in memory, an archive in files, and a gateway's upkeep of both."""

    def __init__(self, directory: Path | None) -> None:
        self.clock = PausedClock(NOON)
        self.quota = MemoryQuota(self.clock)
        self.meter = Recorder()
        self.archive: LedgerArchive | None = None if directory is None else LedgerFiles(directory)
        self.upkeep = self.gateway(self.archive)

    def gateway(self, archive: LedgerArchive | None) -> LedgerUpkeep:
        return LedgerUpkeep(self.quota, archive, self.clock, self.meter, LedgerPolicy(kept_days=40))

    def reader(self) -> ArchivedLedger:
        return ArchivedLedger(self.quota, self.archive)

    async def use(self, *names: str, organisation: str = "umbrella") -> None:
        for name in names:
            order = claim(name)
            account = replace(order.account, organisation=replace(order.account.organisation, name=organisation))
            await self.quota.settle(replace(order, account=account, owner=name), Delivered(7, 3, 2))


def run(body: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(body())


async def read(ledger: LedgerReader, page: int = 2) -> list[str]:
    """Requests in the order of the ledger, page by page."""
    found: list[LedgerEntry] = []
    while entries := await ledger.entries("umbrella", found[-1].id if found else "", page):
        found += entries
    return [entry.request_id for entry in found]


def test_only_what_is_archived_and_old_is_trimmed_and_usage_stays_whole(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path)
        await world.use("a", "b", "c")
        await world.upkeep.once()
        world.clock.advance(30 * DAY)
        await world.use("d", "e")
        await world.upkeep.once()
        assert (await world.quota.extent("umbrella")).entries == 5, "forty days are kept"
        world.clock.advance(20 * DAY)
        await world.use("f")
        await world.upkeep.once()
        assert [entry.request_id for entry in await world.quota.entries("umbrella")] == ["d", "e", "f"]
        await world.use("g")
        for page in (1, 2, 100):
            assert await read(world.reader(), page) == ["a", "b", "c", "d", "e", "f", "g"]

    run(body)


def test_nothing_is_trimmed_that_is_on_no_disk(tmp_path: Path) -> None:
    class Full(LedgerFiles):
        async def append(self, organisation: str, entries: Sequence[LedgerEntry]) -> None:
            if organisation == "umbrella":
                raise StateUnavailable("ledger files: disk full")
            await super().append(organisation, entries)

    async def body() -> None:
        world = World(tmp_path)
        await world.use("a", "b")
        await world.use("x", organisation="zeta")
        world.clock.advance(100 * DAY)
        await world.gateway(Full(tmp_path)).once()
        assert await read(world.quota) == ["a", "b"]
        assert (await world.quota.extent("zeta")).entries == 0, "what fails for one holds up no other"
        assert world.meter.values["quota_ledger_archive_failures"] == 1
        await world.upkeep.once()
        assert await read(world.quota) == [] and await read(world.reader()) == ["a", "b"]

    run(body)


def test_gateways_that_archive_into_one_directory_keep_each_charge_once(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path)
        names = [f"r{number}" for number in range(50)]
        await world.use(*names)
        gateways = [world.gateway(LedgerFiles(tmp_path)) for _ in range(4)]
        await asyncio.gather(*(gateway.once() for gateway in gateways))
        world.clock.advance(41 * DAY)
        await asyncio.gather(*(gateway.once() for gateway in gateways))
        assert (await world.quota.extent("umbrella")).entries == 0
        assert await read(world.reader(), 20) == names

    run(body)


def test_a_gateway_without_the_files_says_that_it_lacks_what_was_trimmed(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path / "one")
        await world.use("a")
        world.clock.advance(41 * DAY)
        await world.use("b")
        await world.upkeep.once()
        newest = (await world.quota.entries("umbrella"))[-1]
        for archive in (None, LedgerFiles(tmp_path / "other")):
            elsewhere = ArchivedLedger(world.quota, archive)
            with pytest.raises(NotFound, match=r"organizations/umbrella until 2025-11-30T12:00:00.*ledger_directory"):
                await read(elsewhere)
            behind = f"{int((NOON + DAY) * 1000)}-999999999"
            assert list(await elsewhere.entries("umbrella", behind)) == [newest]

    run(body)


def test_without_a_directory_the_length_is_told_and_nothing_is_trimmed() -> None:
    async def body() -> None:
        world = World(None)
        await world.use("a", "b", "c")
        await world.use("x", organisation="zeta")
        world.clock.advance(400 * DAY)
        await world.upkeep.once()
        assert world.meter.values["quota_ledger_entries"] == 4
        assert world.meter.values["quota_ledger_longest"] == 3
        assert await read(world.reader()) == ["a", "b", "c"]

    run(body)


def test_ledgers_are_looked_after_again_after_an_outage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Unsteady(MemoryQuota):
        is_away = True

        async def extent(self, organisation: str) -> LedgerExtent:
            if self.is_away:
                raise StateUnavailable("away")
            return await super().extent(organisation)

    async def body() -> None:
        world = World(tmp_path)
        quota = world.quota = Unsteady(world.clock)
        await world.use("a")
        async with world.gateway(world.archive).running(), asyncio.timeout(20):
            while "away" not in caplog.text:
                await asyncio.sleep(0)
            quota.is_away = False
            world.clock.advance(301)
            while not await LedgerFiles(tmp_path).latest("umbrella"):
                await asyncio.sleep(0)

    with caplog.at_level(logging.INFO):
        run(body)
