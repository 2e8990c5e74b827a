"""Remembers why requests were refused, beside the requests' way: a flood of refusals makes nobody wait."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from baton.core.admin_api import RefusalsApi
from baton.core.background import background
from baton.core.clock import Clock
from baton.core.errors import QuotaExceeded, StateUnavailable
from baton.core.telemetry import Meter
from baton.core.types import QuotaClaim, RefusalNote

WRITE_SECONDS = 0.1
WAITING = 10_000  # notes that may wait to be written; the oldest are dropped beyond it
WRITTEN_AT_ONCE = 500


class RefusalLog:
    def __init__(self, refusals: RefusalsApi, clock: Clock, meter: Meter) -> None:
        self._refusals = refusals
        self._clock = clock
        self._waiting: deque[RefusalNote] = deque(maxlen=WAITING)
        self._lost = meter.counter("quota_refusal_notes_lost", "Refusals that nobody can look up any more")

    def note(self, claim: QuotaClaim, error: QuotaExceeded) -> None:
        if len(self._waiting) == WAITING:
            self._lost.add()
        self._waiting.append(
            RefusalNote(
                request_id=claim.request_id,
                at=self._clock.wall(),
                tenant=claim.account.tenant.name,
                key_id=claim.account.key.id,
                model=claim.model,
                input_tokens=claim.input_tokens,
                output_tokens=claim.output_tokens,
                refusals=error.refusals,
            )
        )

    @asynccontextmanager
    async def written(self) -> AsyncIterator[None]:
        """Notes are written a moment after they were made, while the block lasts, and at its end."""
        try:
            async with background(self._write_again_and_again(), "refusal log"):
                yield
        finally:
            with suppress(StateUnavailable):
                await self.write()

    async def write(self) -> None:
        """What waits. StateUnavailable when Redis is away, which loses what was on its way there."""
        while self._waiting:
            count = min(len(self._waiting), WRITTEN_AT_ONCE)
            notes = [self._waiting.popleft() for _ in range(count)]
            try:
                await self._refusals.note(notes)
            except StateUnavailable:
                self._lost.add(count)
                raise

    async def _write_again_and_again(self) -> None:
        while True:
            await self._clock.sleep(WRITE_SECONDS)
            with suppress(StateUnavailable):
                await self.write()
