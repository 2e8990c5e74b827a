"""A worker process: an engine process beside this front, which serves both kinds of work whatever its role."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from baton.core.arguments import Arguments
from baton.core.background import background
from baton.core.clock import Clock
from baton.core.config import Section
from baton.core.errors import PeerUnavailable
from baton.core.memory import keep_large_buffers
from baton.core.streams import closing
from baton.core.types import Candidate, DecodeRequest, Role, StopRules, TokenRequest
from baton.engine.client import EngineClient, spawn_engine
from baton.engine.config import EngineConfig, device_defaults
from baton.rpc.decode_service import decode_service
from baton.rpc.directory import DirectoryClient
from baton.rpc.kvreceiver import KvReceiverClient, kvreceiver_service
from baton.rpc.link import EnginePulse, first_of
from baton.rpc.prefill import PrefillClient, prefill_service
from baton.rpc.serving import Service
from baton.rpc.tier import TierClient, warm_service
from baton.state.config import StateConfig
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.handshake import identity
from services.kvtransfer.offloader import Offloader
from services.kvtransfer.tier_peer import RegisteredTier
from services.kvtransfer.transports import Transports, open_transports
from services.process.config import WorkerConfig
from services.process.main import run_service
from services.process.process import ServiceProcess, service_process
from services.worker.catalogue import Catalogue
from services.worker.load import EngineSeries
from services.worker.parts import WorkerParts, build_parts
from services.worker.watchdog import EngineWatchdog

log = logging.getLogger(__name__)

KVTRANSFER = Section("kvtransfer", KvTransferConfig)
ENGINE = Section("engine", EngineConfig, device_defaults)
STATE = Section("state", StateConfig)
CATALOGUE_SECONDS = 1.0


def main(role: Role, section: Section[WorkerConfig]) -> None:
    keep_large_buffers()  # KV passes through this process in messages of megabytes
    run_service(f"services.{role.value}", (section, KVTRANSFER, ENGINE, STATE), partial(serve, role, section))


async def serve(role: Role, section: Section[WorkerConfig], arguments: Arguments) -> None:
    settings = arguments.settings
    config = settings.fill(section)
    async with AsyncExitStack() as stack:
        process = await stack.enter_async_context(service_process(arguments.id, role, config, settings.fill(STATE)))
        loading = stack.enter_async_context(spawn_engine(settings.fill(ENGINE), on_progress=log.info))
        engine = await process.unless_stopped(loading)
        process.registration.describe(engine.card, lambda: engine.stats)
        kvtransfer = settings.fill(KVTRANSFER)
        transports = stack.enter_context(open_transports(engine, process.id, process.epoch, kvtransfer, process.clock))
        tier = _tier(process, kvtransfer)
        parts = _parts(process, engine, transports, kvtransfer, tier)
        transports.receive(parts.receiver)
        await process.unless_stopped(warm_up(parts))
        await stack.enter_async_context(background(_report(process, engine), "engine series"))
        await stack.enter_async_context(background(_catalogue(process, engine), "block catalogue"))
        await tier.look()
        await stack.enter_async_context(background(tier.run(), "cache tier look-out"))
        if kvtransfer.tier_offload_mb_per_second:
            offloader = _offloader(process, engine, kvtransfer, tier, parts)
            await stack.enter_async_context(background(offloader.run(), "cache tier offload"))
        async with process.serving(_services(process, engine, parts)):
            hangs = _engine_hang(engine, parts, process.clock, config.engine_stall_seconds)
            await first_of(process.stopping.wait(), _engine_end(engine), hangs)


def _tier(process: ServiceProcess, kvtransfer: KvTransferConfig) -> RegisteredTier:
    def at(address: str) -> TierClient:
        return TierClient(process.channels.get(address), kvtransfer.tier_answer_seconds)

    return RegisteredTier(process.registry, at, process.clock, rest_seconds=kvtransfer.peer_rest_seconds)


def _offloader(
    process: ServiceProcess,
    engine: EngineClient,
    kvtransfer: KvTransferConfig,
    tier: RegisteredTier,
    parts: WorkerParts,
) -> Offloader:
    return Offloader(
        engine,
        engine.card.format,
        tier,
        parts.economy,
        config=kvtransfer,
        meter=process.meter,
        clock=process.clock,
    )


def _parts(
    process: ServiceProcess,
    engine: EngineClient,
    transports: Transports,
    kvtransfer: KvTransferConfig,
    tier: RegisteredTier,
) -> WorkerParts:
    channels, limit = process.channels, kvtransfer.acknowledge_seconds
    return build_parts(
        engine,
        Candidate(process.id, process.address, process.epoch),
        receivers=lambda ticket: KvReceiverClient(channels.get(ticket.receiver_address), limit),
        prefill_peers=lambda candidate: PrefillClient(channels.get(candidate.address)),
        transports=transports,
        kvtransfer=kvtransfer,
        meter=process.meter,
        clock=process.clock,
        tiers=tier,
        tracer=process.tracer,
    )


def _services(process: ServiceProcess, engine: EngineClient, parts: WorkerParts) -> Sequence[Service]:
    def pulse() -> EnginePulse:
        return EnginePulse(engine.stats.steps, parts.computing())

    return (
        decode_service(
            parts.decode,
            worker_id=process.id,
            epoch=process.epoch,
            pulse=pulse,
            clock=process.clock,
            tracer=process.tracer,
        ),
        prefill_service(parts.prefill),
        kvreceiver_service(parts.receiver),
        warm_service(parts.warmer),
    )


async def warm_up(parts: WorkerParts) -> None:
    """One tiny answer, so that the first real one is not the slowest. Its prompt is too short for the prefix cache."""
    request = TokenRequest("warm-up", prompt=(0,), stop=StopRules(max_tokens=2, ignore_eos=True))
    async with closing(parts.decode.generate(DecodeRequest(request))) as chunks:
        async for _ in chunks:
            pass


async def _report(process: ServiceProcess, engine: EngineClient) -> None:
    series = EngineSeries(process.meter)
    while True:
        series.update(engine.stats)
        await process.clock.sleep(process.config.heartbeat_seconds)


async def _catalogue(process: ServiceProcess, engine: EngineClient) -> None:
    me = identity(process.id, process.epoch, engine.card)
    catalogue = Catalogue(
        engine, process.registry, lambda at: DirectoryClient(process.channels.get(at)), me, process.address
    )
    await catalogue.run(process.clock, CATALOGUE_SECONDS)


async def _engine_end(engine: EngineClient) -> None:
    """An engine that ends takes its worker with it: somebody else will start both again."""
    raise PeerUnavailable(f"the engine ended: {await engine.closed()}")


async def _engine_hang(engine: EngineClient, parts: WorkerParts, clock: Clock, stall_seconds: float) -> None:
    watchdog = EngineWatchdog(stall_seconds, clock.now())
    while True:
        watchdog.look(engine.stats.steps, parts.computing(), clock.now())
        await clock.sleep(min(1.0, stall_seconds / 4))
