"""One process's gRPC server: health, reflection, keepalive, limits, TLS, and a drain that loses nothing."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.core.clock import Clock, Ids, RandomIds, SystemClock
from baton.core.errors import ConfigError
from baton.core.telemetry import SILENT_TRACER, Meter, Tracer
from baton.rpc.calls import Calls
from baton.rpc.channels import DEFAULT_KEEPALIVE, MAX_MESSAGE_BYTES, Keepalive, Option, read_authority, read_pair
from baton.rpc.interceptors import HEALTH_SERVICE, CallInterceptor

STOP_SECONDS: Final = 1.0  # after the drain, for links to say goodbye

# The stubs leave parts of these untyped.
_aio: Any = grpc.aio
_health: Any = health

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer, ready to be added to a server.

    ``counted`` False: its calls are not requests of their own, so a drain neither refuses nor awaits them (KV offers
    for requests that run already; links, which count the requests inside them).
    """

    name: str
    mount: Callable[[grpc.aio.Server, Calls], None]
    counted: bool = True


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files. ``client_ca`` set: clients must show a certificate that it signed."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """ConfigError when a file is missing, not PEM, or the two do not belong together."""
        certificate, key = read_pair(self.certificate, self.key)
        authority = read_authority(self.client_ca) if self.client_ca is not None else None
        return grpc.ssl_server_credentials([(key, certificate)], authority, authority is not None)


@dataclass(frozen=True, slots=True)
class ServerPolicy:
    """``token``: what callers must bring, empty for none. ``drain``: seconds that running requests get at the end."""

    token: str = field(default="", repr=False)
    tls: ServerTls | None = None
    keepalive: Keepalive = DEFAULT_KEEPALIVE
    drain: float = 30.0
    channelz: bool = False


class HealthServicer(Protocol):
    async def set(self, service: str, status: int) -> None: ...


class RunningServer:
    """A server that listens at ``address`` (the real port, where 0 was asked for)."""

    def __init__(self, address: str, calls: Calls, health: HealthServicer, services: Sequence[str]) -> None:
        self.address = address
        self._calls = calls
        self._health = health
        self._services = services

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def in_flight(self) -> int:
        """Requests that run now."""
        return self._calls.in_flight

    async def set_serving(self, serving: bool) -> None:
        """What health answers for the services; for the process as a whole ("") it is alive as long as it runs."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            await self._health.set(service, status)

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests with Overloaded and wait for the running ones. False: some still run after ``timeout``.

        The same is done when the ``async with`` ends.
        """
        self._calls.refuse_new()
        await self.set_serving(False)
        return await self._calls.drained(timeout)


@asynccontextmanager
async def serve(
    services: Sequence[Service],
    address: str,
    meter: Meter,
    policy: ServerPolicy = ServerPolicy(),
    *,
    clock: Clock | None = None,
    ids: Ids | None = None,
    tracer: Tracer = SILENT_TRACER,
) -> AsyncIterator[RunningServer]:
    """Serve at ``host:port`` while the block runs, then drain and stop. Port 0: any free one.

    ConfigError, naming the address, when it cannot be bound.
    """
    calls = Calls(meter, clock or SystemClock())
    counted = frozenset(service.name for service in services if service.counted)
    interceptor = CallInterceptor(calls, ids or RandomIds(), policy.token, counted, tracer)
    server: grpc.aio.Server = _aio.server(interceptors=[interceptor], options=_options(policy.keepalive))
    for service in services:
        service.mount(server, calls)
    health_servicer = _mount_standard_services(server, [service.name for service in services], channelz=policy.channelz)
    port = _bind(server, address, policy.tls)
    running = RunningServer(
        f"{address.rpartition(':')[0]}:{port}", calls, health_servicer, [service.name for service in services]
    )
    await health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    await running.set_serving(True)
    await server.start()
    try:
        yield running
        if not await running.drain(policy.drain):
            _log.warning("drain ended with %d requests in flight after %g s", running.in_flight, policy.drain)
    finally:
        calls.refuse_new()
        calls.closing.set()
        await server.stop(STOP_SECONDS)


def _options(keepalive: Keepalive) -> list[Option]:
    return [
        *keepalive.options(),
        # Accept pings as often as any client of ours sends them, with calls or without.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),  # a second server on the port is a mistake, not a balancer
    ]


def _mount_standard_services(server: grpc.aio.Server, names: Sequence[str], *, channelz: bool) -> HealthServicer:
    servicer = _health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*names, HEALTH_SERVICE, reflection.SERVICE_NAME], server)
    if channelz:
        from grpc_channelz.v1 import channelz as channelz_module

        _add: Any = channelz_module.add_channelz_servicer
        _add(server)
    return servicer


def _bind(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> int:
    try:
        if tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: the port is in use or the address is not ours") from error
