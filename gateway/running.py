"""Requests in progress: which call owns a request id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from baton.core.deadline import Deadline
from baton.core.errors import Cancelled

TAKEOVER_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Owner:
    deadline: Deadline
    ended: asyncio.Event


class RunningRequests:
    """Which call owns a request id. A later call with the same id takes over; the older one ends with Cancelled."""

    def __init__(self) -> None:
        self._owners: dict[tuple[str, str], _Owner] = {}
        self._count = 0

    @property
    def count(self) -> int:
        """Calls in progress, superseded ones included until they have ended."""
        return self._count

    @asynccontextmanager
    async def own(self, tenant: str, request_id: str, deadline: Deadline) -> AsyncIterator[None]:
        """Be the call of this id while the block lasts. Waits, for a bounded time, until an older one has let go."""
        key = (tenant, request_id)
        older = self._owners.get(key)
        me = _Owner(deadline, asyncio.Event())
        self._owners[key] = me
        self._count += 1
        try:
            if older is not None:
                older.deadline.cut(Cancelled(f"request {request_id} was taken over by a later call"))
                await _ended(older)
            yield
        finally:
            self._count -= 1
            me.ended.set()
            if self._owners.get(key) is me:
                del self._owners[key]


async def _ended(older: _Owner) -> None:
    """Its client may read nothing and so keep it from ending; its stall bound deals with that, not the newer call."""
    with suppress(TimeoutError):
        async with asyncio.timeout(TAKEOVER_SECONDS):
            await older.ended.wait()
