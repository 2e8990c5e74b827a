"""Where the tier is, and which worker warms it: from the registry alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import BatonError, PeerUnavailable, StateUnavailable
from baton.core.types import (
    EngineStats,
    KvFormat,
    ModelCard,
    ProcessRecord,
    Role,
    TierChanges,
    TokenRequest,
    WorkerState,
)
from baton.state.registry import MemoryRegistry
from services.kvtransfer.tier import Tier
from services.kvtransfer.tier_peer import NoTier, RegisteredTier
from services.kvtransfer.warm import FleetWarmer
from tests.tier_blocks import block, name_of

CARD = ModelCard("m", "llama", 64, 32, "hash", KvFormat("float32", 16, 1, 1, 8))
TIER = ProcessRecord("kvtransfer-0", Role.KVTRANSFER, "tier-0:1", 1, 1, state=WorkerState.READY)
WORKER = ProcessRecord("prefill-0", Role.PREFILL, "prefill-0:1", 2, 2, state=WorkerState.READY, card=CARD)


class Away(MemoryRegistry):
    async def processes(self) -> Sequence[ProcessRecord]:
        raise StateUnavailable("away")


def registered(*records: ProcessRecord) -> MemoryRegistry:
    registry = MemoryRegistry(ManualClock())
    for record in records:
        asyncio.run(registry.register(record, 60))
    return registry


class AtAddress(Tier):
    def __init__(self, address: str) -> None:
        super().__init__(memory_bytes=1 << 20, disk=None, message_bytes=1 << 20)
        self.address = address
        self.error: BatonError | None = None
        self.asked = 0

    async def changes(self, epoch: int, version: int) -> TierChanges:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return await super().changes(epoch, version)


def peer(registry: MemoryRegistry, clock: ManualClock) -> RegisteredTier:
    tiers: dict[str, AtAddress] = {}
    return RegisteredTier(
        registry, lambda address: tiers.setdefault(address, AtAddress(address)), clock, rest_seconds=5
    )


def address(found: RegisteredTier) -> str:
    tier = found.find()
    assert isinstance(tier, AtAddress)
    return tier.address


def test_all_workers_choose_the_ready_tier_with_the_lowest_id() -> None:
    others = [replace(TIER, id=f"kvtransfer-{n}", address=f"tier-{n}:1", epoch=n) for n in (3, 2)]
    loading = replace(TIER, state=WorkerState.DRAINING)
    found = peer(registered(*others, loading, WORKER), ManualClock())
    assert found.find() is None  # it has not looked yet
    asyncio.run(found.look())
    assert address(found) == "tier-2:1"


def test_a_lost_tier_is_left_alone_for_a_while_and_a_restarted_one_is_not() -> None:
    clock, registry = ManualClock(), registered(TIER)
    found = peer(registry, clock)
    asyncio.run(found.look())
    found.lost("silent")
    assert found.find() is None
    asyncio.run(registry.register(replace(TIER, epoch=9), 60))
    asyncio.run(found.look())
    assert address(found) == "tier-0:1"
    found.lost("silent")
    clock.advance(5)
    assert address(found) == "tier-0:1"


def test_a_registry_that_is_away_changes_nothing() -> None:
    found = peer(Away(ManualClock()), ManualClock())
    found._chosen = ("tier-0:1", 1)
    asyncio.run(found.look())
    assert address(found) == "tier-0:1"
    assert NoTier().find() is None


def test_it_knows_what_the_tier_holds_without_asking_it() -> None:
    async def main() -> None:
        found = peer(registry, ManualClock())
        assert found.leading([name_of(1)]) == 0
        await found.look()
        tier = found.find()
        assert isinstance(tier, AtAddress)
        await tier.put([block(1), block(2), block(4)])
        await found.look()
        asked = tier.asked
        assert found.leading([name_of(n) for n in (1, 2, 3, 4)]) == 2
        found.holds([name_of(3)])
        assert found.leading([name_of(n) for n in (1, 2, 3, 4)]) == 4
        found.lacks(name_of(2))
        assert found.leading([name_of(n) for n in (1, 2, 3, 4)]) == 1
        assert tier.asked == asked
        found.lost("silent")
        assert found.leading([name_of(1)]) == 0

    registry = registered(TIER)
    asyncio.run(main())


def test_another_life_of_the_tier_holds_nothing_of_the_former_one() -> None:
    async def main() -> None:
        found = peer(registry, ManualClock())
        await found.look()
        found.holds([name_of(1)])
        await registry.register(replace(TIER, epoch=9), 60)
        await found.look()
        assert found.is_there and found.leading([name_of(1)]) == 0

    registry = registered(TIER)
    asyncio.run(main())


@pytest.mark.parametrize(("error", "is_there"), [(PeerUnavailable("gone"), False), (BatonError("unknown"), True)])
def test_a_tier_that_does_not_say_what_it_holds_is_asked_for_nothing(error: BatonError, is_there: bool) -> None:
    async def main() -> None:
        found = peer(registry, ManualClock())
        await found.look()
        tier = found.find()
        assert isinstance(tier, AtAddress)
        await tier.put([block(1)])
        tier.error = error
        await found.look()
        assert (found.is_there, found.leading([name_of(1)])) == (is_there, 0)

    registry = registered(TIER)
    asyncio.run(main())


class Warmed:
    """A worker at an address that has put a block into the tier."""

    def __init__(self, address: str, asked: list[str]) -> None:
        self.address, self.asked = address, asked

    async def warm(self, request: TokenRequest) -> tuple[bytes, ...]:
        self.asked.append(self.address)
        return (name_of(1),)


def test_the_least_busy_worker_of_the_model_warms_and_the_blocks_are_pinned() -> None:
    busy = replace(WORKER, id="prefill-1", address="prefill-1:1", stats=EngineStats(running=3))
    decode = replace(WORKER, id="decode-0", address="decode-0:1", role=Role.DECODE)
    asked: list[str] = []
    tier = Tier(memory_bytes=1 << 20, disk=None, message_bytes=1 << 20)

    async def main() -> None:
        await tier.put([block(1)])
        await warmer.warm(TokenRequest("r", (1, 2), model="m"))
        assert asked == ["prefill-0:1"]
        assert tier.stats.pinned_blocks == 1
        with pytest.raises(PeerUnavailable, match="other"):
            await warmer.warm(TokenRequest("r", (1, 2), model="other"))

    warmer = FleetWarmer(registered(busy, decode, WORKER, TIER), lambda at: Warmed(at, asked), tier)
    asyncio.run(main())
