"""The gateway: ``python -m gateway --id NAME``."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from baton.core.arguments import Arguments
from baton.core.clock import Clock, RandomIds
from baton.core.config import Section
from baton.core.errors import TokenizerMissing
from baton.core.types import Account, Candidate, Role
from baton.rpc.admin import admin_service
from baton.rpc.decode_link import DecodeLink
from baton.rpc.planner import PlannerClient
from baton.rpc.serving import Service
from baton.state.config import StateConfig
from gateway.config import GatewayConfig
from gateway.doors.native import native_door
from gateway.fleet import FleetView, FleetWatch
from gateway.keys import load_keys
from gateway.links import LinkPool, tended
from gateway.parts import build_gateway
from gateway.planning import DiscoveredPlanner
from gateway.prices import PriceBook, load_prices
from gateway.prompt import ModelText, Prompts, load_model_text
from gateway.quotas import Quotas, shared_quotas
from services.process.main import run_service
from services.process.process import ServiceProcess, service_process

GATEWAY = Section("gateway", GatewayConfig)
STATE = Section("state", StateConfig)


async def serve(arguments: Arguments) -> None:
    config, state = arguments.settings.fill(GATEWAY), arguments.settings.fill(STATE)
    ring = load_keys(config.keys_file)
    prices = load_prices(Path(config.prices_file)) if config.prices_file else PriceBook()
    async with service_process(arguments.id, Role.GATEWAY, config, state) as process:
        fleet = FleetView(process.clock, down_seconds=config.down_seconds)
        watch = FleetWatch(process.registry, fleet, process.clock, interval=config.fleet_poll_ms / 1000)
        open_link = partial(_open_link, process)
        async with (
            watch.running(),
            tended(LinkPool(open_link, fleet), process.clock) as links,
            shared_quotas(
                state,
                ring,
                fleet.facts,
                clock=process.clock,
                ids=RandomIds(),
                meter=process.meter,
                policy=config.admission_policy(state.quota_remember_seconds),
                replicas=lambda: max(config.replicas, fleet.gateways),
                delivery_directory=Path(config.delivery_log_directory) if config.delivery_log_directory else None,
                ledger_directory=Path(config.ledger_directory) if config.ledger_directory else None,
                ledger_policy=config.ledger_policy,
            ) as quotas,
        ):
            process.registration.describe_degraded(quotas.admission.why_degraded)
            gateway = build_gateway(
                fleet=fleet,
                prompts=Prompts(_load_texts(config.tokenizer_directories(), process.clock)),
                admission=quotas.admission,
                refusals=quotas.refusals,
                planner=DiscoveredPlanner(fleet, partial(_connect_planner, process), config.planner_address),
                links=links,
                meter=process.meter,
                clock=process.clock,
                ids=RandomIds(),
                policy=config.policy,
                relay=config.relay,
                planner_budget_seconds=config.planner_budget_ms / 1000,
                prices=prices,
            )
            door = native_door(gateway, quotas.callers, stall_seconds=config.client_stall_seconds)
            async with process.serving([door, _admin_door(quotas)]):
                await process.stopping.wait()


def _admin_door(quotas: Quotas) -> Service:
    async def account_of(presented: str | None) -> Account:
        return (await quotas.callers.authenticate(presented)).payer

    return admin_service(quotas.admin, account_of)


def _load_texts(directories: Mapping[str, Path], clock: Clock) -> dict[str, ModelText]:
    """Models whose directory has no tokenizer are left out: they serve token ids only."""
    found: dict[str, ModelText] = {}
    for name, directory in directories.items():
        try:
            found[name] = load_model_text(directory, clock)
        except TokenizerMissing:
            continue
    return found


def _open_link(process: ServiceProcess, worker: Candidate) -> DecodeLink:
    security = process.config.client_security()
    return DecodeLink(worker, gateway_id=process.id, security=security, tracer=process.tracer)


def _connect_planner(process: ServiceProcess, address: str) -> PlannerClient:
    return PlannerClient(process.channels.get(address))


if __name__ == "__main__":
    run_service("gateway", (GATEWAY, STATE), serve)
