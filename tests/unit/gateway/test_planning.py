from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import (
    BatonError,
    Draining,
    InvalidRequest,
    Overloaded,
    PeerUnavailable,
    StateUnavailable,
    UnknownModel,
)
from baton.core.telemetry import SilentMeter
from baton.core.types import PlanQuery, Role, WorkerState
from gateway.fleet import FleetView, FleetWatch
from gateway.planning import ANSWERS_UNTIL_BACK, PLANNER_UNREACHABLE, Placing, least_load_plan
from tests.unit.gateway.doubles import CARD, MODEL, RankedPlanner, candidate, record

QUERY = PlanQuery("r", MODEL, "acme", 10, 20)


def view_of(*records: object) -> FleetView:
    view = FleetView(ManualClock())
    view.update(list(records))  # type: ignore[arg-type]
    return view


def placing(planner: RankedPlanner, view: FleetView, budget: float = 0.02) -> Placing:
    return Placing(planner, view, SilentMeter(), budget_seconds=budget)


def test_without_the_planner_the_gateway_keeps_to_the_pools_that_it_registered() -> None:
    dedicated, common = replace(record("a"), labels=("acme-only",)), record("b")
    planner = replace(record("p", role=Role.PLANNER), pools=("tenant:acme=acme-only", "future:x=y"), card=None)
    view = view_of(dedicated, common, planner)
    other = replace(QUERY, tenant="zeta")
    for _ in range(2):
        plans = [least_load_plan(query, view, 0) for query in (QUERY, other)]
        assert [[one.worker_id for one in plan.decode] for plan in plans] == [["a"], ["b"]]
        view.update([dedicated, common])  # the planner is gone, and its map is still known
    view.update([common])
    with pytest.raises(Overloaded, match="in the pool 'acme-only': 1 are elsewhere"):
        least_load_plan(QUERY, view, 0)
    view.update([dedicated])
    with pytest.raises(Overloaded, match="outside the dedicated pools: 1 are elsewhere"):
        least_load_plan(other, view, 0)


def test_a_silent_planner_costs_its_budget_and_no_more() -> None:
    planner = RankedPlanner(["a"], silent=True)
    plan = asyncio.run(placing(planner, view_of(record("a"))).plan(QUERY))
    assert plan.reasons == (PLANNER_UNREACHABLE,)
    assert [worker.worker_id for worker in plan.decode] == ["a"]


@pytest.mark.parametrize(
    "error", [PeerUnavailable("gone"), BatonError("bug"), UnknownModel("behind"), Draining("ends")]
)
def test_a_broken_planner_is_replaced_by_least_load_with_local_prefill(error: BatonError) -> None:
    planner = RankedPlanner(["a"])
    planner.error = error
    plan = asyncio.run(placing(planner, view_of(record("a", load=3), record("b"))).plan(QUERY))
    assert [worker.worker_id for worker in plan.decode] == ["b", "a"]
    assert plan.prefill == ()
    assert plan.local_prefill_max_tokens >= QUERY.prompt_tokens + QUERY.max_tokens


def test_an_incomplete_plan_is_refused_and_replaced() -> None:
    class Empty(RankedPlanner):
        async def plan(self, query: PlanQuery):
            return replace(await super().plan(query), decode=())

    plan = asyncio.run(placing(Empty(["a"]), view_of(record("a"))).plan(QUERY))
    assert plan.reasons == (PLANNER_UNREACHABLE,)


@pytest.mark.parametrize("error", [Overloaded("full"), InvalidRequest("bad")])
def test_what_the_planner_refuses_stays_refused(error: BatonError) -> None:
    planner = RankedPlanner(["a"])
    planner.error = error
    with pytest.raises(type(error)):
        asyncio.run(placing(planner, view_of(record("a"))).plan(QUERY))


def test_logs_once_per_change_and_not_while_answers_come_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    planner = RankedPlanner(["a"])
    away = PeerUnavailable("x")

    async def run() -> None:
        place = placing(planner, view_of(record("a")), budget=5)
        for error in (away, away, None, away, *[None] * ANSWERS_UNTIL_BACK, None, away):
            planner.error = error
            await place.plan(QUERY)

    with caplog.at_level(logging.INFO, logger="gateway.planning"):
        asyncio.run(run())
    assert [entry.levelname for entry in caplog.records] == ["WARNING", "INFO", "WARNING"]


def test_an_absent_registry_leaves_the_last_fleet_in_use_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Flaky:
        def __init__(self) -> None:
            self.away = False

        async def processes(self):
            if self.away:
                raise StateUnavailable("gone")
            return [record("a")]

    async def run() -> None:
        registry, view = Flaky(), FleetView(ManualClock())
        watch = FleetWatch(registry, view, ManualClock(), interval=0.2)  # type: ignore[arg-type]
        for away in (False, True, False, *[True] * 8, False, False):
            registry.away = away
            await watch.look()
            assert [worker.id for worker in view.ready(MODEL)] == ["a"]

    with caplog.at_level(logging.INFO, logger="gateway.fleet"):
        asyncio.run(run())
    assert [entry.levelname for entry in caplog.records] == ["WARNING", "INFO"]


def test_an_own_plan_keeps_the_window_of_an_earlier_hop_and_its_workers_have_the_module() -> None:
    windowed = replace(CARD, modules=("attention_window",))
    later = replace(QUERY, hop=1, attention_window=64)
    plan = least_load_plan(later, view_of(record("a"), record("b", load=3, card=windowed)), 0)
    assert ([worker.worker_id for worker in plan.decode], plan.attention_window) == (["b"], 64)
    assert least_load_plan(QUERY, view_of(record("a")), 0).attention_window is None
    with pytest.raises(Overloaded):
        least_load_plan(later, view_of(record("a")), 0)


def test_own_plans_spread_over_equal_workers() -> None:
    view = view_of(*[record(f"w{i}") for i in range(4)])
    firsts = Counter(least_load_plan(QUERY, view, turn).decode[0].worker_id for turn in range(400))
    assert set(firsts.values()) == {100}


def test_own_plans_count_what_was_just_sent() -> None:
    view = view_of(record("a"), record("b"))
    with view.sending("a"):
        assert {least_load_plan(QUERY, view, turn).decode[0].worker_id for turn in range(4)} == {"b"}
    assert view.running_on("a") == 0


def test_prefill_workers_take_decode_work_only_after_the_decode_workers() -> None:
    view = view_of(record("p", role=Role.PREFILL), record("d", load=50))
    assert [worker.worker_id for worker in least_load_plan(QUERY, view, 0).decode] == ["d", "p"]
    assert [worker.worker_id for worker in least_load_plan(replace(QUERY, avoid=("d",)), view, 0).decode] == ["p"]


def test_only_ready_workers_of_the_model_are_used() -> None:
    draining = replace(record("x"), state=WorkerState.DRAINING)
    other = record("y", card=replace(CARD, model="other"))
    view = view_of(record("a"), draining, other, replace(record("g"), role=Role.GATEWAY))
    assert [worker.worker_id for worker in least_load_plan(QUERY, view, 0).decode] == ["a"]


def test_a_model_stays_known_while_its_workers_are_away() -> None:
    view = view_of(record("a"))
    view.update([])
    with pytest.raises(Overloaded):
        least_load_plan(QUERY, view, 0)
    with pytest.raises(UnknownModel):
        least_load_plan(replace(QUERY, model="never"), view, 0)


def test_a_worker_is_down_for_a_while_or_until_it_is_another_process() -> None:
    clock = ManualClock()
    view = FleetView(clock, down_seconds=2.0)
    view.update([record("a"), record("b")])
    view.mark_down(candidate("a"))
    view.mark_down(candidate("b"))
    view.update([record("a"), replace(record("b"), epoch=2)])
    assert view.down() == ("a",)
    clock.advance(2.0)
    assert view.down() == ()


def test_the_shortest_context_of_a_models_workers_counts() -> None:
    view = view_of(record("a"), record("b", card=replace(CARD, context_length=100)))
    card = view.card(MODEL)
    assert card is not None
    assert card.context_length == 100


def test_gateways_that_are_registered_are_counted() -> None:
    view = view_of(record("a"), record("g-0", role=Role.GATEWAY), record("g-1", role=Role.GATEWAY))
    assert (view.gateways, FleetView(ManualClock()).gateways) == (2, 0)
