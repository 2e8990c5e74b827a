"""Where a request goes: the planner's answer, or an own one when the planner is silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from baton.core.api import PlannerApi
from baton.core.errors import BatonError, Draining, InvalidRequest, Overloaded, PeerUnavailable, UnknownModel
from baton.core.telemetry import Counter, Meter
from baton.core.types import Candidate, Module, Plan, PlanQuery, ProcessRecord, Role
from gateway.fleet import FleetView

log = logging.getLogger(__name__)
ANSWERS_UNTIL_BACK = 10
PLANNER_UNREACHABLE = "planner_unreachable"


class DiscoveredPlanner(PlannerApi):
    """The planner at the address that the registry names, or at a fixed one."""

    def __init__(self, fleet: FleetView, connect: Callable[[str], PlannerApi], address: str = "") -> None:
        self._fleet = fleet
        self._connect = connect
        self._address = address
        self._turn = 0

    async def plan(self, query: PlanQuery) -> Plan:
        addresses = (self._address,) if self._address else self._fleet.addresses(Role.PLANNER)
        if not addresses:
            raise PeerUnavailable("no planner is registered")
        self._turn += 1
        return await self._connect(addresses[self._turn % len(addresses)]).plan(query)


class Placing(PlannerApi):
    """Asks the planner within a budget; silent or gone, places by least load with local prefill.

    Workers that failed other requests a moment ago are avoided while there are others.
    """

    def __init__(self, planner: PlannerApi, fleet: FleetView, meter: Meter, *, budget_seconds: float) -> None:
        self._planner = planner
        self._fleet = fleet
        self._budget = budget_seconds
        self._silent = False
        self._answers_in_a_row = 0
        self._turn = 0
        self._own_plans: Counter = meter.counter("planner_fallbacks", "Requests that the gateway placed by itself")

    async def plan(self, query: PlanQuery) -> Plan:
        """Raises Overloaded when no worker may take the request, UnknownModel when none ever served the model."""
        suspects = tuple(worker for worker in self._fleet.down() if worker not in query.avoid)
        if not suspects:
            return await self._ask(query)
        try:
            return await self._ask(replace(query, avoid=query.avoid + suspects))
        except Overloaded:
            return await self._ask(query)

    async def _ask(self, query: PlanQuery) -> Plan:
        try:
            plan = await self._within_budget(query)
            if not plan.decode:
                raise BatonError("it sent a plan without decode workers")
        except Draining as error:
            return self._own_plan(query, error)
        except (Overloaded, InvalidRequest):
            self._note(answering=True)
            raise
        except BatonError as error:  # away, broken, or (UnknownModel) behind: callers know the model from the registry
            return self._own_plan(query, error)
        self._note(answering=True)
        return plan

    def _own_plan(self, query: PlanQuery, error: BatonError) -> Plan:
        self._note(answering=False, why=error.message)
        self._own_plans.add()
        self._turn += 1
        return least_load_plan(query, self._fleet, self._turn)

    async def _within_budget(self, query: PlanQuery) -> Plan:
        call = asyncio.ensure_future(self._planner.plan(query))
        try:
            await asyncio.wait((call,), timeout=self._budget)
            if not call.done():
                await asyncio.sleep(0)  # if this process was the slow one, the answer may be waiting in its socket
            if call.done():
                return call.result()
        finally:
            call.cancel()
        raise PeerUnavailable(f"the planner did not answer within {self._budget * 1000:.0f} ms")

    def _note(self, *, answering: bool, why: str = "") -> None:
        """Log each change once. One answer among many late ones is no change."""
        self._answers_in_a_row = self._answers_in_a_row + 1 if answering else 0
        if not answering and not self._silent:
            self._silent = True
            log.warning("planner unreachable: placing by least load", extra={"reason": why})
        elif self._silent and self._answers_in_a_row >= ANSWERS_UNTIL_BACK:
            self._silent = False
            log.info("planner answers again")


def least_load_plan(query: PlanQuery, fleet: FleetView, turn: int) -> Plan:
    """Decode workers first, then others; by load, ties taken in turn. The decode worker computes the prompt itself.

    Gives no directive but those of an earlier hop.
    """
    if fleet.card(query.model) is None:
        raise UnknownModel(f"model: no worker ever served {query.model!r}")
    anywhere = [record for record in fleet.ready(query.model) if record.id not in query.avoid]
    own = [record for record in anywhere if fleet.pools.may_use(record.labels, query)]
    if anywhere and not own:
        where = fleet.pools.where(query)
        raise Overloaded(f"no ready worker serves {query.model!r} {where}: {len(anywhere)} are elsewhere")
    ready = [record for record in own if _has_modules(record, query)]
    if not ready:
        raise Overloaded(f"no ready worker serves {query.model!r}")
    shift = turn % len(ready)
    ranked = sorted(ready[shift:] + ready[:shift], key=lambda record: _load(record, fleet))
    decode = tuple(Candidate(record.id, record.address, record.epoch) for record in ranked)
    whole_context = query.prompt_tokens + query.max_tokens
    return Plan(decode, (), whole_context, (PLANNER_UNREACHABLE,), query.attention_window)


def _has_modules(record: ProcessRecord, query: PlanQuery) -> bool:
    """It has the module that an earlier hop was computed with."""
    modules = () if record.card is None else record.card.modules
    return query.attention_window is None or Module.ATTENTION_WINDOW in modules


def _load(record: ProcessRecord, fleet: FleetView) -> tuple[bool, float]:
    stats = record.stats
    held = stats.held_blocks / stats.total_blocks if stats.total_blocks else 0.0
    requests = max(stats.running + stats.waiting, fleet.running_on(record.id))
    return record.role is not Role.DECODE, requests + 8 * held
