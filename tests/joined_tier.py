"""A cache tier that a test may break, and what fills it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from baton.core.api import TierApi
from baton.core.clock import SystemClock
from baton.core.telemetry import SilentMeter
from baton.core.types import TierBlock
from services.kvtransfer.offloader import Offloader
from services.kvtransfer.tier import Tier
from tests.networks import StackWorker


@dataclass
class Joined:
    """A tier that a test may break, as its workers see it."""

    tier: Tier = field(default_factory=lambda: Tier(memory_bytes=64 << 20, disk=None, message_bytes=1 << 20))
    on_get: Callable[[Sequence[bytes]], Awaitable[None]] | None = None
    spoil: Callable[[TierBlock], TierBlock] | None = None
    is_lost: bool = False
    gets: list[Sequence[bytes]] = field(default_factory=list)

    def find(self) -> TierApi | None:
        return None if self.is_lost else self  # type: ignore[return-value]

    def lost(self, cause: str) -> None:
        self.is_lost = True

    async def get(self, names: Sequence[bytes]) -> tuple[TierBlock, ...]:
        self.gets.append(names)
        if self.on_get is not None:
            await self.on_get(names)
        found = await self.tier.get(names)
        return found if self.spoil is None else tuple(self.spoil(block) for block in found)

    async def leading(self, names: Sequence[bytes]) -> int:
        return await self.tier.leading(names)

    async def missing(self, names: Sequence[bytes]) -> tuple[bytes, ...]:
        return await self.tier.missing(names)

    async def put(self, blocks: Sequence[TierBlock]) -> None:
        await self.tier.put(blocks)


async def offload(worker: StackWorker, joined: Joined) -> None:
    """All that the worker's prefix cache holds goes to the tier, without a clock."""
    offloader = Offloader(
        worker.engine,
        worker.engine.card.format,
        joined,
        worker.parts.economy,
        bytes_per_second=lambda: 1e9,
        queue_blocks=1000,
        meter=SilentMeter(),
        clock=SystemClock(),
    )
    offloader.add(sorted(worker.engine.cached_blocks()[1]))
    while await offloader.ship():
        pass
