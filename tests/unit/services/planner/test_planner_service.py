"""The planner's shell: it never waits on the registry and lives through its absence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import ConfigError, Overloaded, StateUnavailable, UnknownModel
from baton.core.telemetry import SilentMeter
from baton.core.types import EngineStats, KvFormat, ModelCard, PlanQuery, ProcessRecord, Role, WorkerState
from services.planner.config import PlannerConfig
from services.planner.service import Planner

CARD = ModelCard("m", "llama", 8192, 512, "h", KvFormat("fake", 16, 1, 1, 8))
QUERY = PlanQuery("r", "m", "acme", prompt_tokens=200, max_tokens=50)


class Registry:
    """Answers with ``records``, or not at all while ``away``."""

    def __init__(self, *ids: str) -> None:
        self.away = False
        self.asked = 0
        self.records = [
            ProcessRecord(
                worker_id,
                Role.DECODE,
                f"{worker_id}:1",
                1,
                1,
                state=WorkerState.READY,
                card=CARD,
                stats=EngineStats(total_blocks=100, free_blocks=100),
            )
            for worker_id in ids
        ]

    async def register(self, record: ProcessRecord, ttl: float) -> None: ...

    async def deregister(self, process_id: str, epoch: int) -> None: ...

    async def processes(self) -> Sequence[ProcessRecord]:
        self.asked += 1
        if self.away:
            raise StateUnavailable("read the registry: no answer within 50 ms")
        return self.records


def planner(registry: Registry, clock: ManualClock, config: PlannerConfig | None = None) -> Planner:
    return Planner(registry, config or PlannerConfig(), meter=SilentMeter(), clock=clock, noise=lambda: 0.0)


def test_spreads_by_its_own_decisions_and_forgets_them_in_time() -> None:
    async def run() -> None:
        clock = ManualClock()
        made = planner(Registry("a", "b"), clock)
        await made.refresh()
        chosen = [(await made.plan(QUERY)).decode[0].worker_id for _ in range(6)]
        assert sorted(chosen) == ["a", "a", "a", "b", "b", "b"]
        assert chosen[0] != chosen[1]

    asyncio.run(run())


def test_counts_a_request_as_no_longer_than_its_plan_allows() -> None:
    async def run() -> None:
        made = planner(Registry("a", "b"), ManualClock(), PlannerConfig(max_tokens=10))
        await made.refresh()
        endless, short = replace(QUERY, max_tokens=100_000), replace(QUERY, max_tokens=10)
        chosen = [(await made.plan(query)).decode[0].worker_id for query in (endless, short, short, short)]
        assert sorted(chosen) == ["a", "a", "b", "b"]

    asyncio.run(run())


def test_plans_from_the_last_picture_while_the_registry_is_away(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        registry = Registry("a")
        made = planner(registry, ManualClock())
        await made.refresh()
        registry.away = True
        for _ in range(10):
            await made.refresh()
        assert (await made.plan(QUERY)).decode[0].worker_id == "a"
        registry.away = False
        registry.records = []
        await made.refresh()
        with pytest.raises(Overloaded):
            await made.plan(QUERY)

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["registry is away, planning from the last picture", "registry is back"]


def test_running_keeps_the_picture_fresh_and_ends_its_task() -> None:
    async def run() -> None:
        registry = Registry()
        made = planner(registry, ManualClock())
        async with made.running():
            with pytest.raises(UnknownModel):
                await made.plan(QUERY)
            registry.records = Registry("late").records
            async with asyncio.timeout(10):
                while registry.asked < 3:
                    await asyncio.sleep(0)
            assert (await made.plan(QUERY)).decode[0].worker_id == "late"
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_settings_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"planner\.local_prefill_max_tokens must be at least 0, got -1"):
        PlannerConfig(local_prefill_max_tokens=-1)
    with pytest.raises(ConfigError, match=r"planner\.refresh_seconds must be positive, got 0"):
        PlannerConfig(refresh_seconds=0)
