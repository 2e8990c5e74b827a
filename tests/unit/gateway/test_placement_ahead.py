"""Placement while the quota is being reserved: no later, never twice, and not for those who are refused anyway."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.errors import QuotaExceeded
from baton.core.types import Account, KeyRecord, Limits, Organisation, QuotaClaim, QuotaGrant, StopRules, Tenant
from baton.state.quota.memory import MemoryQuota
from tests.unit.gateway.asking import ASK
from tests.unit.gateway.doubles import Fault, Fleet, RankedPlanner, ScriptedDecode

ASKED = replace(ASK, stop=StopRules(ignore_eos=True))


class HeldReserve:
    """A store of counters whose answers to reservations are held back until ``go``."""

    def __init__(self, quota: MemoryQuota, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reserve = quota.reserve
        self.go = asyncio.Event()
        monkeypatch.setattr(quota, "reserve", self.reserve)

    async def reserve(self, claim: QuotaClaim) -> QuotaGrant:
        await self.go.wait()
        return await self._reserve(claim)


def limited(fleet: Fleet, limits: Limits) -> None:
    tenant, key = Tenant("acme", "umbrella", limits=limits), KeyRecord("k", "acme", "", "")
    fleet.caller = replace(fleet.caller, account=Account(Organisation("umbrella"), tenant, key))


async def planned(planner: RankedPlanner, count: int) -> None:
    async with asyncio.timeout(30):
        while len(planner.queries) < count:
            await asyncio.sleep(0)


def test_a_request_is_placed_while_its_quota_is_reserved_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        fleet = Fleet(worker := ScriptedDecode("w0"))
        held = HeldReserve(fleet.quota, monkeypatch)
        asking = asyncio.create_task(fleet.ask(ASKED))
        await planned(fleet.planner, 1)
        assert worker.open == 0, "nothing is computed before it is admitted"
        held.go.set()
        await asking
        assert [query.hop for query in fleet.planner.queries] == [0]
        fleet.assert_idle()

    asyncio.run(body())


def test_further_choices_and_hops_ask_for_plans_of_their_own() -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("a", [Fault(5)]), ScriptedDecode("b"))
        await fleet.ask(replace(ASKED, n=2))
        assert [query.hop for query in fleet.planner.queries] in ([0, 0, 1], [0, 1, 0])
        fleet.assert_idle()

    asyncio.run(body())


def test_a_tenant_over_its_quota_is_not_placed_in_vain_again_until_it_is_admitted() -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0"))
        limited(fleet, Limits(concurrency=0))
        for _ in range(10):
            with pytest.raises(QuotaExceeded):
                await fleet.ask(ASKED)
        assert len(fleet.planner.queries) <= 1, "only the first refusal was not to be expected"
        limited(fleet, Limits())
        await fleet.ask(ASKED)
        limited(fleet, Limits(concurrency=0))
        before = len(fleet.planner.queries)
        with pytest.raises(QuotaExceeded):
            await fleet.ask(ASKED)
        assert len(fleet.planner.queries) <= before + 1

    asyncio.run(body())


def test_who_is_refused_or_leaves_while_being_placed_leaves_no_plan_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0"), planner=RankedPlanner(["w0"], silent=True))
        limited(fleet, Limits(concurrency=0))
        with pytest.raises(QuotaExceeded):
            await fleet.ask(ASKED)
        limited(fleet, Limits())
        HeldReserve(fleet.quota, monkeypatch)
        asking = asyncio.create_task(fleet.ask(ASKED))
        while not fleet.gateway.running:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("plan ")] == []
        fleet.assert_idle()

    asyncio.run(body())
