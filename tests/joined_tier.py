"""A cache tier that a test may break, and what fills it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from baton.core.api import TierApi
from baton.core.clock import SystemClock
from baton.core.telemetry import SilentMeter
from baton.core.types import TierBlock
from services.kvtransfer.config import KvTransferConfig
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

    @property
    def is_there(self) -> bool:
        return not self.is_lost

    def lost(self, cause: str) -> None:
        self.is_lost = True

    def leading(self, names: Sequence[bytes]) -> int:
        return next((count for count, name in enumerate(names) if name not in self.tier), len(names))

    def holds(self, names: Sequence[bytes]) -> None:
        assert self.leading(names) == len(names)

    def lacks(self, name: bytes) -> None:
        assert name not in self.tier or self.spoil is not None

    async def get(self, names: Sequence[bytes]) -> tuple[TierBlock, ...]:
        self.gets.append(names)
        if self.on_get is not None:
            await self.on_get(names)
        found = await self.tier.get(names)
        return found if self.spoil is None else tuple(self.spoil(block) for block in found)

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
        config=KvTransferConfig(tier_offload_blocks=1000),
        meter=SilentMeter(),
        clock=SystemClock(),
    )
    offloader.gather()
    while await offloader.ship():
        pass
