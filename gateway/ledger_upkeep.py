"""The usage ledger's upkeep: how long it is in Redis, its copies in an archive, and what is trimmed behind those.

Every gateway may do it: an archive takes each entry once, whoever brings it. Nothing is trimmed that is not archived.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from baton.core.background import background
from baton.core.clock import Clock
from baton.core.errors import BatonError, StateUnavailable
from baton.core.streams import closing
from baton.core.telemetry import Meter
from baton.core.tenancy_api import LedgerApi, LedgerArchive
from baton.core.types import LedgerExtent, ledger_position
from baton.state.quota.archived_ledger import copy_ledger

log = logging.getLogger(__name__)

DAY = 86_400_000  # milliseconds


@dataclass(frozen=True, slots=True)
class LedgerPolicy:
    """Every ``seconds`` all is copied; what is archived stays in Redis for ``kept_days`` after it was written.

    ``kept_days`` is 1 or more: whoever reads archive and Redis one after the other must miss nothing in between.
    """

    seconds: float = 300.0
    kept_days: int = 40


class LedgerUpkeep:
    def __init__(
        self, ledger: LedgerApi, archive: LedgerArchive | None, clock: Clock, meter: Meter, policy: LedgerPolicy
    ) -> None:
        """Without ``archive`` lengths are told and nothing is trimmed."""
        self._ledger = ledger
        self._archive = archive
        self._clock = clock
        self._policy = policy
        self._length = meter.gauge("quota_ledger_entries", "Entries of all usage ledgers in Redis")
        self._longest = meter.gauge("quota_ledger_longest", "Entries of the longest usage ledger in Redis")
        self._archived = meter.counter(
            "quota_ledger_archived", "Ledger entries that this gateway copied to the archive"
        )
        self._failures = meter.counter(
            "quota_ledger_archive_failures", "Ledgers that could not be archived; tried again"
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with background(self._every(), "ledger upkeep"):
            yield

    async def _every(self) -> None:
        while True:
            try:
                await self.once()
            except StateUnavailable as error:
                log.info("usage ledgers not looked after: %s", error.message)
            await self._clock.sleep(self._policy.seconds)

    async def once(self) -> None:
        """All ledgers, one after the other. One that cannot be archived holds up no other."""
        lengths: list[int] = []
        failed: list[tuple[str, BatonError]] = []
        async with closing(self._ledger.organisations()) as organisations:
            async for organisation in organisations:
                extent = await self._ledger.extent(organisation)
                lengths.append(extent.entries)
                if self._archive is not None and extent.entries:
                    try:
                        await self._keep(self._archive, organisation, extent)
                    except BatonError as error:
                        failed.append((organisation, error))
        self._length.set(sum(lengths))
        self._longest.set(max(lengths, default=0))
        if failed:
            self._failures.add(len(failed))
            names, first = [organisation for organisation, _ in failed], failed[0][1].message
            log.warning(
                "usage ledgers not archived: %s", first, extra={"organizations": names[:10], "failed": len(names)}
            )

    async def _keep(self, archive: LedgerArchive, organisation: str, extent: LedgerExtent) -> None:
        latest = await archive.latest(organisation)
        if extent.trimmed > max(0, ledger_position(latest)[0]):
            lacking = "the archive lacks what was trimmed behind another one"
            log.warning("usage ledger of %s: %s", organisation, lacking)
        self._archived.add(await copy_ledger(self._ledger, archive, organisation))
        over = round(self._clock.wall() * 1000) - self._policy.kept_days * DAY
        if 0 <= ledger_position(extent.oldest)[0] < over:
            latest = await archive.latest(organisation)
            behind = latest if ledger_position(latest)[0] < over else f"{over:013d}-0"
            await self._ledger.trim(organisation, behind)
