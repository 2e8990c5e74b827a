"""A ledger in two places: its newest entries are with the counters, all others, and copies of those, archived."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime

from baton.core.errors import NotFound
from baton.core.streams import closing
from baton.core.tenancy_api import LedgerApi, LedgerArchive
from baton.core.types import LedgerEntry, QuotaAlert, ledger_position

PAGE = 1000


async def copy_ledger(ledger: LedgerApi, archive: LedgerArchive, organisation: str) -> int:
    """Copy what the archive lacks; how many entries that was. One that stops anywhere goes on from there."""
    copied, after = 0, await archive.latest(organisation)
    while page := await ledger.entries(organisation, after, PAGE):
        await archive.append(organisation, page)
        copied, after = copied + len(page), page[-1].id
    return copied


class ArchivedLedger:
    """Implements ``LedgerReader``. The archive has a beginning of the ledger, so it is read first.

    ``archive`` None, or another than the one that was trimmed behind: NotFound for what is nowhere here.
    """

    def __init__(self, ledger: LedgerApi, archive: LedgerArchive | None) -> None:
        self._ledger = ledger
        self._archive = archive

    async def organisations(self) -> AsyncIterator[str]:
        seen = set[str]()
        if self._archive is not None:
            for name in await self._archive.organisations():
                seen.add(name)
                yield name
        async with closing(self._ledger.organisations()) as names:
            async for name in names:
                if name not in seen:
                    yield name

    async def entries(self, organisation: str, after: str = "", limit: int = 1000) -> Sequence[LedgerEntry]:
        archived = "" if self._archive is None else await self._archive.latest(organisation)
        if self._archive is not None and ledger_position(archived) > ledger_position(after):
            return await self._archive.entries(organisation, after, limit)
        trimmed = (await self._ledger.extent(organisation)).trimmed
        if trimmed > max(0, ledger_position(after)[0], ledger_position(archived)[0]):
            until = datetime.fromtimestamp(trimmed / 1000, UTC)
            where = "it is in the gateway.ledger_directory of another gateway"
            raise NotFound(f"usage of organizations/{organisation} until {until:%Y-%m-%dT%H:%M:%SZ}: {where}")
        return await self._ledger.entries(organisation, after, limit)

    async def alerts(self, organisation: str, after: str = "", limit: int = 1000) -> Sequence[QuotaAlert]:
        return await self._ledger.alerts(organisation, after, limit)
