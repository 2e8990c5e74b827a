"""Ledgers in files: nothing lost and nothing doubled, whoever writes and wherever it stopped."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import ConfigError, InvalidRequest, StateUnavailable
from baton.core.types import (
    Account,
    Delivered,
    KeyRecord,
    LedgerEntry,
    LedgerReason,
    Organisation,
    QuotaClaim,
    Tenant,
    ledger_position,
)
from baton.state.quota.archived_ledger import PAGE, ArchivedLedger, copy_ledger
from baton.state.quota.ledger_files import LedgerFiles
from baton.state.quota.memory import MemoryQuota

ACCOUNT = Account(Organisation("umbrella"), Tenant("acme", "umbrella"), KeyRecord("k1", "acme", "", ""))
JANUARY = 1_767_225_600_000  # 2026-01-01, milliseconds
DAY = 86_400_000


async def used(quota: MemoryQuota, count: int, name: str) -> None:
    for number in range(count):
        await quota.settle(QuotaClaim(f"{name}-{number}", "g", ACCOUNT, "mødel", 5, 5), Delivered(5, 0, number))


def entry(entry_id: str, request_id: str = "r") -> LedgerEntry:
    return LedgerEntry(entry_id, 1, LedgerReason.SETTLED, request_id, "acme", "k1", "m", 1, 5, 0, 2, 0, 0)


def ids(entries: Sequence[LedgerEntry]) -> list[str]:
    return [entry.id for entry in entries]


async def everything(files: LedgerFiles) -> list[LedgerEntry]:
    return list(await files.entries("umbrella", limit=100 * PAGE))


def test_what_is_copied_is_what_was_booked_and_later_only_what_is_new(tmp_path: Path) -> None:
    async def body() -> None:
        quota, files = MemoryQuota(ManualClock(1000.0)), LedgerFiles(tmp_path)
        await used(quota, PAGE + 7, "a")
        assert await copy_ledger(quota, files, "umbrella") == PAGE + 7
        assert await everything(files) == list(await quota.entries("umbrella", limit=10 * PAGE))
        await quota.trim("umbrella", await files.latest("umbrella"))
        await used(quota, 3, "b")
        assert await copy_ledger(quota, LedgerFiles(tmp_path), "umbrella") == 3
        assert [entry.request_id for entry in await everything(files)][-3:] == ["b-0", "b-1", "b-2"]
        assert (await copy_ledger(quota, files, "umbrella"), await copy_ledger(quota, files, "nobody")) == (0, 0)

    asyncio.run(body())


def test_organisations_that_files_or_counters_know_are_told_once(tmp_path: Path) -> None:
    async def body() -> None:
        old, quota, files = MemoryQuota(ManualClock(1000.0)), MemoryQuota(ManualClock(2000.0)), LedgerFiles(tmp_path)
        assert list(await files.organisations()) == []
        await used(old, 2, "a")
        await copy_ledger(old, files, "umbrella")
        assert list(await files.organisations()) == ["umbrella"]
        await used(quota, 1, "b")
        for ledger, archive in ((quota, files), (quota, None), (MemoryQuota(ManualClock(3000.0)), files)):
            assert [name async for name in ArchivedLedger(ledger, archive).organisations()] == ["umbrella"]

    asyncio.run(body())


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_a_line_that_a_crash_cut_off_is_no_entry_and_comes_again(tmp_path: Path, kept: int) -> None:
    async def body() -> None:
        quota, files = MemoryQuota(ManualClock(1000.0)), LedgerFiles(tmp_path)
        await used(quota, 6, "a")
        await copy_ledger(quota, files, "umbrella")
        [path] = (tmp_path / "umbrella").glob("*.jsonl")
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:20])
        assert len(await everything(files)) == kept
        assert await copy_ledger(quota, files, "umbrella") == 6 - kept
        assert path.read_bytes() == b"".join(lines)

    asyncio.run(body())


def test_a_copy_that_fails_half_way_goes_on_from_there(tmp_path: Path) -> None:
    class Failing(LedgerFiles):
        async def append(self, organisation: str, entries: Sequence[LedgerEntry]) -> None:
            if entries[0].output_tokens:
                raise StateUnavailable("disk full")
            await super().append(organisation, entries)

    async def body() -> None:
        quota = MemoryQuota(ManualClock(1000.0))
        await used(quota, PAGE + 2, "a")
        with pytest.raises(StateUnavailable, match="disk full"):
            await copy_ledger(quota, Failing(tmp_path), "umbrella")
        assert await copy_ledger(quota, LedgerFiles(tmp_path), "umbrella") == 2
        assert len(await everything(LedgerFiles(tmp_path))) == PAGE + 2

    asyncio.run(body())


def test_entries_are_found_behind_any_id_in_months_and_pages(tmp_path: Path) -> None:
    """Against a plain list; ids of one millisecond are counted, and longer counts are later ones."""
    chance = random.Random(7)
    moments = sorted(JANUARY + chance.randrange(70) * DAY for _ in range(60))
    written = [f"{moment}-{number}" for number, moment in enumerate(moments)]

    async def body() -> None:
        files = LedgerFiles(tmp_path)
        await files.append("umbrella", [entry(each, "x" * chance.randrange(100)) for each in written])
        months = sorted(path.name for path in (tmp_path / "umbrella").glob("*.jsonl"))
        assert months == ["2026-01.jsonl", "2026-02.jsonl", "2026-03.jsonl"]
        asked = [*written, "", f"{JANUARY - 1}-0", f"{moments[30]}-18446744073709551615", f"{JANUARY + 90 * DAY}-0"]
        for after in asked:
            for limit in (1, 7, 1000):
                later = [each for each in written if ledger_position(each) > ledger_position(after)]
                assert ids(await files.entries("umbrella", after, limit)) == later[:limit]
        assert await files.latest("umbrella") == written[-1]

    asyncio.run(body())


def test_writers_that_race_keep_each_entry_once(tmp_path: Path) -> None:
    """Each brings all entries in pages of its own, as gateways do that copy at the same time."""
    entries = [entry(f"{JANUARY + number}-0") for number in range(400)]

    def write(page: int) -> None:
        async def body() -> None:
            files = LedgerFiles(tmp_path)
            for start in range(0, len(entries), page):
                await files.append("umbrella", entries[start : start + page])

        asyncio.run(body())

    writers = [threading.Thread(target=write, args=(page,)) for page in (7, 13, 40, 100)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert asyncio.run(everything(LedgerFiles(tmp_path))) == entries


def test_what_is_no_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "umbrella").mkdir()
    (tmp_path / "umbrella" / "2026-01.jsonl").write_text('{"id":"1"}\n')
    files = LedgerFiles(tmp_path)
    for call in (files.latest("umbrella"), files.entries("umbrella"), files.append("umbrella", [entry("1-0")])):
        with pytest.raises(StateUnavailable, match=r"umbrella/2026-01\.jsonl.*no entry"):
            asyncio.run(call)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match="organization"):
        asyncio.run(files.latest("../umbrella"))


def test_a_directory_that_cannot_be_written_is_an_outage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateUnavailable, match="ledger files"):
        asyncio.run(LedgerFiles(tmp_path / "file").append("umbrella", [entry("1-0")]))


def test_entries_come_back_field_by_field(tmp_path: Path) -> None:
    async def body() -> None:
        quota, files = MemoryQuota(ManualClock(1000.0)), LedgerFiles(tmp_path)
        await used(quota, 1, "a")
        (made,) = await quota.entries("umbrella")
        changed = replace(made, cost=12, energy_millijoules=3, cached_tokens=2)
        await files.append("umbrella", [changed])
        assert await everything(files) == [changed]

    asyncio.run(body())


def test_a_directory_that_cannot_be_written_to_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"ledger directory .*file/ledger: cannot be written to: Not a directory"):
        LedgerFiles.opened(tmp_path / "file" / "ledger")


def test_opening_makes_the_directory_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    LedgerFiles.opened(tmp_path / "new" / "ledger")
    assert list((tmp_path / "new" / "ledger").iterdir()) == []
