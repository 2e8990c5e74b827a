"""Connections to other processes: channel options, security, and one pool of channels by address."""

from __future__ import annotations

import asyncio
import hmac
import ssl
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import grpc
import grpc.aio

from baton.core.errors import BatonError, ConfigError, InvalidRequest, PeerUnavailable, Unauthenticated
from baton.core.telemetry import SILENT_TRACER, Tracer
from baton.rpc.errors import being_cancelled, from_rpc_error, is_bare

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
REQUEST_ID_KEY: Final = "x-request-id"
AUTHORIZATION_KEY: Final = "authorization"
TRACEPARENT_KEY: Final = "traceparent"
CONNECT_SECONDS: Final = 1.0

T = TypeVar("T")
Option = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Keepalive:
    """HTTP/2 pings, the same on both ends: one after ``interval`` seconds without data, dead after ``timeout`` more.

    Short, because between services it is what notices a stopped process whose connection stays open.
    """

    interval: float = 1.0
    timeout: float = 2.0

    def options(self) -> list[Option]:
        return [
            ("grpc.keepalive_time_ms", round(self.interval * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.timeout * 1000)),
            # A ping without an answer ends the connection after this; left out, gRPC 1.85 waits for a minute instead.
            ("grpc.http2.ping_timeout_ms", round(self.timeout * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),  # no limit: a prefill may be silent for long
        ]


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files: the authority that signed the server, and our own pair where the server asks for one."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """ConfigError when a file is missing or not PEM."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("tls: certificate and key must be given together")
        chain = key = None
        if self.certificate is not None and self.key is not None:
            chain, key = read_pair(self.certificate, self.key)
        return grpc.ssl_channel_credentials(read_authority(self.ca), key, chain)


def read_pair(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """The bytes of a certificate chain and its key; ConfigError when they cannot be read or do not belong together."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        return certificate.read_bytes(), key.read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls: cannot use certificate {certificate} with key {key}: {error}") from error


def read_authority(path: Path) -> bytes:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
        return path.read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls: cannot use certificate authority {path}: {error}") from error


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """How we prove who we are. ``token`` is the secret that the services share, empty for none."""

    token: str = field(default="", repr=False)
    tls: ClientTls | None = None


NO_SECURITY: Final = ClientSecurity()
DEFAULT_KEEPALIVE: Final = Keepalive()


def bearer(token: str) -> str:
    return f"Bearer {token}"


def same_secret(given: str, expected: str) -> bool:
    """Equality whose duration tells nothing about where the two differ."""
    return hmac.compare_digest(given.encode(), expected.encode())


@dataclass(slots=True, eq=False)
class PeerChannel:
    """An open channel and what every call on it carries. ``calls``: unary calls that wait for their answer."""

    address: str
    channel: grpc.aio.Channel = field(repr=False)
    token: str = field(default="", repr=False)
    tracer: Tracer = field(default=SILENT_TRACER, repr=False)
    calls: int = 0

    def metadata(self, request_id: str = "") -> grpc.aio.Metadata:
        """What every call brings. Raises InvalidRequest or Unauthenticated for characters that no header can carry."""
        if not _is_visible(request_id):
            raise InvalidRequest.out_of_range(
                "request_id", repr(request_id[:64]), "must hold visible ASCII characters only"
            )
        if not _is_visible(self.token):
            raise Unauthenticated("the API key or token must hold visible ASCII characters only")
        pairs = [(REQUEST_ID_KEY, request_id)] if request_id else []
        if self.token:
            pairs.append((AUTHORIZATION_KEY, bearer(self.token)))
        if traceparent := self.tracer.traceparent():
            pairs.append((TRACEPARENT_KEY, traceparent))
        return grpc.aio.Metadata(*pairs)

    async def answer(self, call: Awaitable[T]) -> T:
        """The response of a unary call, or the typed error that it ended with."""
        try:
            return await self._finished(call)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self.address) from error

    async def answer_soon(self, call: Awaitable[T], limit: float) -> T:
        """Like ``answer``, for a call whose timeout is our own ``limit`` and not a request's: late means lost."""
        try:
            return await self._finished(call)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and is_bare(error):
                raise PeerUnavailable(f"{self.address}: no answer within {limit:g} s") from error
            raise from_rpc_error(error, self.address) from error

    async def _finished(self, call: Awaitable[T]) -> T:
        """gRPC says CancelledError too when the channel is closed under a call; nobody cancelled its caller then."""
        self.calls += 1
        try:
            return await call
        except asyncio.CancelledError as error:
            if being_cancelled():
                raise
            raise PeerUnavailable(f"{self.address}: the channel was closed") from error
        finally:
            self.calls -= 1

    def incomplete(self, error: InvalidRequest) -> BatonError:
        """A response that means nothing is the peer's fault, not our caller's."""
        return BatonError(f"{self.address} sent an incomplete answer: {error.message}")

    async def close(self) -> None:
        await self.channel.close(None)


def open_channel(
    address: str,
    security: ClientSecurity = NO_SECURITY,
    keepalive: Keepalive = DEFAULT_KEEPALIVE,
    tracer: Tracer = SILENT_TRACER,
) -> PeerChannel:
    """A channel with its own connection to ``host:port``. Nothing is sent before the first call."""
    options: list[Option] = [
        *keepalive.options(),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A slow reader must be felt by the sender, not hidden in megabytes of buffer.
        ("grpc.http2.lookahead_bytes", 65536),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),  # whether a request may be sent twice is for its caller to say
        # A peer that came back is found at once, and one that swallows packets does not hold a call for 20 s.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", round(CONNECT_SECONDS * 1000)),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    if security.tls is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, security.tls.credentials(), options=options)
    return PeerChannel(address, channel, security.token, tracer)


class ChannelPool:
    """One channel an address, opened when first asked for, all closed at the end of the ``async with``."""

    def __init__(
        self,
        security: ClientSecurity = NO_SECURITY,
        keepalive: Keepalive = DEFAULT_KEEPALIVE,
        tracer: Tracer = SILENT_TRACER,
    ) -> None:
        self._security = security
        self._keepalive = keepalive
        self._tracer = tracer
        self._channels: dict[str, PeerChannel] = {}

    def get(self, address: str) -> PeerChannel:
        if address not in self._channels:
            self._channels[address] = open_channel(address, self._security, self._keepalive, self._tracer)
        return self._channels[address]

    async def discard(self, address: str) -> None:
        """Close the channel to a peer that left; its running calls end."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def discard_idle(self, addresses: Iterable[str]) -> frozenset[str]:
        """Close the channels to these addresses on which no unary call runs; returns those that have none any more."""
        wanted = frozenset(addresses)
        busy = {address for address in wanted if address in self._channels and self._channels[address].calls}
        for address in wanted - busy:
            await self.discard(address)
        return wanted - busy

    async def aclose(self) -> None:
        for address in list(self._channels):
            await self.discard(address)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _is_visible(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text
