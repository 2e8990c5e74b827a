"""A gateway, joined from what its process gives it."""

from __future__ import annotations

from collections.abc import Callable

from baton.core.api import DecodeApi, PlannerApi
from baton.core.clock import Clock, Ids
from baton.core.telemetry import Meter
from baton.core.types import Candidate
from gateway.admission import Admission
from gateway.fleet import FleetView
from gateway.meters import RequestMeters
from gateway.planning import Placing
from gateway.prices import PriceBook
from gateway.prompt import Prompts
from gateway.refusal_log import RefusalLog
from gateway.relay import Relay, RelayPolicy
from gateway.running import RunningRequests
from gateway.service import Gateway, GatewayParts, GatewayPolicy

FREE_OF_CHARGE = PriceBook()


def build_gateway(
    *,
    fleet: FleetView,
    prompts: Prompts,
    admission: Admission,
    refusals: RefusalLog,
    planner: PlannerApi,
    links: Callable[[Candidate], DecodeApi],
    meter: Meter,
    clock: Clock,
    ids: Ids,
    policy: GatewayPolicy,
    relay: RelayPolicy,
    planner_budget_seconds: float,
    prices: PriceBook = FREE_OF_CHARGE,
) -> Gateway:
    """``planner`` and ``links`` may be the domain objects themselves or their clients."""
    placing = Placing(planner, fleet, meter, budget_seconds=planner_budget_seconds)
    parts = GatewayParts(
        fleet=fleet,
        prompts=prompts,
        admission=admission,
        refusals=refusals,
        prices=prices,
        relay=Relay(placing, links, fleet, clock, meter, relay),
        running=RunningRequests(),
        meters=RequestMeters(meter, clock, lambda model: fleet.card(model) is not None),
        ids=ids,
    )
    return Gateway(parts, policy)
