"""Channels to processes that left are closed, so that a fleet that comes and goes leaves no connections behind."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from baton.core.api import RegistryApi
from baton.core.clock import Clock
from baton.core.errors import StateUnavailable
from baton.rpc.channels import ChannelPool

DEPARTURES_SECONDS: Final = 5.0


async def close_departed(channels: ChannelPool, registry: RegistryApi, clock: Clock) -> None:
    """Look from time to time. A channel with calls in progress stays: a registry that forgot is no reason to break one.

    Addresses that never were in the registry (a planner at a fixed address) are left alone.
    """
    seen: frozenset[str] = frozenset()
    while True:
        await clock.sleep(DEPARTURES_SECONDS)
        with suppress(StateUnavailable):
            present = frozenset(record.address for record in await registry.processes())
            seen |= present
            seen -= await channels.discard_idle(seen - present)
