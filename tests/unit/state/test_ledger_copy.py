"""A ledger copied to files: nothing lost and nothing doubled, wherever the copying stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.clock import ManualClock
from baton.core.types import Account, Delivered, KeyRecord, LedgerEntry, Organisation, QuotaClaim, Tenant
from baton.state.quota.ledger_copy import PAGE, LedgerFiles, copy_ledger
from baton.state.quota.memory import MemoryQuota

ACCOUNT = Account(Organisation("umbrella"), Tenant("acme", "umbrella"), KeyRecord("k1", "acme", "", ""))


async def used(quota: MemoryQuota, count: int, name: str) -> None:
    for number in range(count):
        await quota.settle(QuotaClaim(f"{name}-{number}", "g", ACCOUNT, "mødel", 5, 5), Delivered(5, 0, number))


def test_what_is_copied_is_what_was_booked_and_later_only_what_is_new(tmp_path: Path) -> None:
    async def body() -> None:
        quota, files = MemoryQuota(ManualClock(1000.0)), LedgerFiles(tmp_path)
        await used(quota, PAGE + 7, "a")
        assert await copy_ledger(quota, files, "umbrella") == PAGE + 7
        assert files.read("umbrella") == list(await quota.entries("umbrella", limit=10 * PAGE))
        await quota.trim("umbrella", await files.latest("umbrella"))
        await used(quota, 3, "b")
        assert await copy_ledger(quota, LedgerFiles(tmp_path), "umbrella") == 3
        assert [entry.request_id for entry in files.read("umbrella")][-3:] == ["b-0", "b-1", "b-2"]
        assert (await copy_ledger(quota, files, "umbrella"), await copy_ledger(quota, files, "nobody")) == (0, 0)

    asyncio.run(body())


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_a_line_that_a_crash_cut_off_comes_again(tmp_path: Path, kept: int) -> None:
    async def body() -> None:
        quota, files = MemoryQuota(ManualClock(1000.0)), LedgerFiles(tmp_path)
        await used(quota, 6, "a")
        await copy_ledger(quota, files, "umbrella")
        path = tmp_path / "umbrella.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:20])
        assert await copy_ledger(quota, files, "umbrella") == 6 - kept
        assert path.read_bytes() == b"".join(lines)

    asyncio.run(body())


def test_a_copy_that_fails_half_way_goes_on_from_there(tmp_path: Path) -> None:
    class Failing(LedgerFiles):
        async def append(self, organisation: str, entries: Sequence[LedgerEntry]) -> None:
            if entries[0].output_tokens:
                raise OSError("disk full")
            await super().append(organisation, entries)

    async def body() -> None:
        quota = MemoryQuota(ManualClock(1000.0))
        await used(quota, PAGE + 2, "a")
        with pytest.raises(OSError, match="disk full"):
            await copy_ledger(quota, Failing(tmp_path), "umbrella")
        assert await copy_ledger(quota, LedgerFiles(tmp_path), "umbrella") == 2
        assert len(LedgerFiles(tmp_path).read("umbrella")) == PAGE + 2

    asyncio.run(body())


def test_what_is_no_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "umbrella.jsonl").write_text('{"id":"1"}\n')
    with pytest.raises(ValueError, match=r"umbrella\.jsonl:1"):
        LedgerFiles(tmp_path).read("umbrella")
    with pytest.raises(ValueError, match="not an entry"):
        asyncio.run(LedgerFiles(tmp_path).latest("umbrella"))


def test_entries_come_back_field_by_field(tmp_path: Path) -> None:
    async def body() -> None:
        quota, files = MemoryQuota(ManualClock(1000.0)), LedgerFiles(tmp_path)
        await used(quota, 1, "a")
        (entry,) = await quota.entries("umbrella")
        changed = replace(entry, cost=12, energy_millijoules=3, cached_tokens=2)
        await files.append("umbrella", [changed])
        assert files.read("umbrella") == [changed]

    asyncio.run(body())
