"""The shell that every service has in common: identity, metrics, registry, connections, and an orderly end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from os import getpid
from typing import TypeVar

from baton.core.api import RegistryApi
from baton.core.background import background
from baton.core.clock import Clock, RandomIds, SystemClock
from baton.core.errors import Cancelled
from baton.core.reserved_port import reserved_port
from baton.core.telemetry import Tracer
from baton.core.types import ProcessRecord, Role, WorkerState
from baton.rpc.channels import ChannelPool, Keepalive
from baton.rpc.serving import Service, serve
from baton.state.config import StateConfig
from baton.state.redis_client import connect
from baton.state.registry import RedisRegistry
from baton.telemetry.http import Endpoints, serve_http
from baton.telemetry.metrics import PrometheusMeter
from baton.telemetry.traces import OpenTelemetryTracer
from services.process.config import ProcessConfig
from services.process.departures import close_departed
from services.process.registration import Registration

log = logging.getLogger(__name__)

T = TypeVar("T")

# A stopped peer keeps its connections open; within 1.5 s its calls fail and go elsewhere. gRPC answers pings outside
# Python, so that a busy peer does not look like a stopped one.
PEER_KEEPALIVE = Keepalive(interval=0.5, timeout=1.0)


@dataclass(frozen=True)
class ServiceProcess:
    """One running service. ``address`` is where others will reach it, known before it serves."""

    id: str
    role: Role
    epoch: int
    address: str
    listen: str
    config: ProcessConfig
    meter: PrometheusMeter
    tracer: Tracer
    clock: Clock
    registry: RegistryApi
    channels: ChannelPool
    registration: Registration
    stopping: asyncio.Event

    @asynccontextmanager
    async def serving(self, services: Sequence[Service]) -> AsyncIterator[None]:
        """Serve and be READY while the block lasts; then DRAINING until running requests have ended, or too long."""
        policy = self.config.server_policy()
        async with serve(services, self.listen, self.meter, policy, clock=self.clock, tracer=self.tracer):
            with _kept_from_collections():
                await self.registration.set_state(WorkerState.READY)
                yield
            await self.registration.set_state(WorkerState.DRAINING)

    async def unless_stopped(self, work: Awaitable[T]) -> T:
        """The result of ``work``, which is cancelled when the process is told to stop: Cancelled is raised then."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            raise Cancelled("told to stop before it was ready")
        return task.result()


@asynccontextmanager
async def service_process(
    process_id: str, role: Role, config: ProcessConfig, state: StateConfig
) -> AsyncIterator[ServiceProcess]:
    """Everything around a service's own parts, registered as LOADING until ``serving`` says otherwise.

    SIGTERM and SIGINT set ``stopping``. ConfigError when an address cannot be bound.
    """
    meter, clock, epoch = PrometheusMeter(), SystemClock(), RandomIds().epoch()
    tracer = OpenTelemetryTracer(role.value)
    async with (
        connect(state) as client,
        ChannelPool(config.client_security(), PEER_KEEPALIVE, tracer) as channels,
        _address(config) as (address, listen),
    ):
        registry = RedisRegistry(client, state)
        record = config.described(ProcessRecord(process_id, role, address, epoch, getpid()))
        lease = state.lease_seconds
        registration = Registration(registry, record, clock, interval=config.heartbeat_seconds, lease=lease)
        endpoints = Endpoints(meter.exposition, registration.why_not_ready, registration.why_degraded)
        async with serve_http(config.http_host, config.http_port, endpoints) as http_address:
            registration.publish_http(http_address)
            stopping = _stop_requested()
            log.info("started", extra={"id": process_id, "address": address, "http": http_address, "epoch": epoch})
            departures = close_departed(channels, registry, clock)
            async with registration.kept(), background(departures, "close departed"):
                yield ServiceProcess(
                    process_id,
                    role,
                    epoch,
                    address,
                    listen,
                    config,
                    meter,
                    tracer,
                    clock,
                    registry,
                    channels,
                    registration,
                    stopping,
                )
    log.info("ended", extra={"id": process_id})


@contextmanager
def _kept_from_collections() -> Iterator[None]:
    """What the start has made stays to the end. A full collection that goes through it, all modules and messages, would
    hold up every stream for 30 to 60 ms."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@asynccontextmanager
async def _address(config: ProcessConfig) -> AsyncIterator[tuple[str, str]]:
    """(as others reach it, as we listen), the port held for us."""
    with reserved_port(config.host, config.port) as port:
        yield f"{config.advertise_host or config.host}:{port}", f"{config.host}:{port}"


def _stop_requested() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping
