"""Domain objects that do what a test tells them, and both ways to reach them: directly and over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio

from baton.core.api import DecodeApi, DirectoryApi, KvReceiverApi, PlannerApi, PrefillApi
from baton.core.telemetry import SILENT_TRACER, SilentMeter, Tracer
from baton.core.types import (
    Candidate,
    DecodeRequest,
    KvChunk,
    KvConfirmation,
    KvFormat,
    KvHandshake,
    Plan,
    PlanQuery,
    PrefillRequest,
    PrefillResult,
    Ticket,
    TokenChunk,
    TokenRequest,
)
from baton.rpc.channels import NO_SECURITY, ClientSecurity, PeerChannel, open_channel
from baton.rpc.decode_link import DecodeLink
from baton.rpc.decode_service import decode_service
from baton.rpc.directory import DirectoryClient, directory_service
from baton.rpc.kvreceiver import KvReceiverClient, kvreceiver_service
from baton.rpc.link import EnginePulse, LinkPolicy
from baton.rpc.planner import PlannerClient, planner_service
from baton.rpc.prefill import PrefillClient, prefill_service
from baton.rpc.serving import RunningServer, ServerPolicy, Service, serve

T = TypeVar("T")
R = TypeVar("R")

WAYS = ("direct", "wire")
# Bounds that a busy machine does not trip over; a test shortens the one that it is about.
PATIENT = LinkPolicy(heartbeat=0.05, silence=15.0, gateway_silence=15.0, stall=15.0)
PATIENCE = 20.0  # seconds that a test waits for what must happen soon
EPOCH = 2**64 - 3
QUICK_STOP = ServerPolicy(drain=0.0)

TOKENS = TokenRequest(request_id="req-1", prompt=(1, 2, 3), model="m")
TICKET = Ticket("req-1", TOKENS.attempt, "127.0.0.1:1", 7)
HELLO = KvHandshake("prefill-0", EPOCH, "m", "weights", KvFormat("float32", 16, 2, 1, 8), features=("a",))
QUERY = PlanQuery("req-1", "m", "acme", prompt_tokens=3, max_tokens=16)
PLAN = Plan((Candidate("decode-0", "127.0.0.1:1", 1),), (), 0)
GARBAGE = b"\xff\xff\xff\xff"


@dataclass
class Script:
    """Stands for what a domain object does in a call: answers, raises, or blocks until it is cancelled."""

    act: Callable[[], Awaitable[object]] | None = None
    seen: list[object] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, request: object) -> object:
        self.seen.append(request)
        self.begun.set()
        try:
            if self.act is None:
                return await asyncio.Event().wait()
            return await self.act()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def answers(value: object) -> Script:
    async def act() -> object:
        return value

    return Script(act)


def raises(error: BaseException) -> Script:
    async def act() -> object:
        raise error

    return Script(act)


def blocks() -> Script:
    return Script()


class ScriptedPlanner(PlannerApi):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def plan(self, query: PlanQuery) -> Plan:
        return await self.script.run(query)  # type: ignore[return-value]


class ScriptedPrefill(PrefillApi):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        return await self.script.run(request)  # type: ignore[return-value]


class ScriptedReceiver(KvReceiverApi):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return await self.script.run(hello)  # type: ignore[return-value]

    async def offer(self, chunk: KvChunk) -> None:
        await self.script.run(chunk)

    async def confirm(self, confirmation: KvConfirmation) -> None:
        await self.script.run(confirmation)


class ScriptedDirectory(DirectoryApi):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def announce(self, peer: KvHandshake, address: str) -> None:
        await self.script.run((peer, address))

    async def publish(
        self, worker_id: str, epoch: int, sequence: int, added: Sequence[bytes], removed: Sequence[bytes]
    ) -> bool:
        return await self.script.run((worker_id, epoch, sequence, added, removed))  # type: ignore[return-value]

    async def reset(self, worker_id: str, epoch: int, sequence: int, held: Sequence[bytes]) -> None:
        await self.script.run((worker_id, epoch, sequence, held))

    async def holders(self, hashes: Sequence[bytes]) -> dict[str, int]:
        return await self.script.run(hashes)  # type: ignore[return-value]

    async def peers(self) -> Sequence[tuple[KvHandshake, str]]:
        return await self.script.run(None)  # type: ignore[return-value]


class ScriptedDecode(DecodeApi):
    """Streams what ``chunks`` yields for a request; records which requests run and which were cancelled."""

    def __init__(self, chunks: Callable[[DecodeRequest], AsyncIterator[TokenChunk]]) -> None:
        self._chunks = chunks
        self.seen: list[DecodeRequest] = []
        self.running: set[str] = set()
        self.cancelled: list[str] = []

    async def generate(self, request: DecodeRequest) -> AsyncIterator[TokenChunk]:
        name = request.tokens.request_id
        self.seen.append(request)
        self.running.add(name)
        try:
            async for chunk in self._chunks(request):
                yield chunk
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(name)
            raise
        finally:
            self.running.discard(name)


async def nothing(_: object) -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


# --- the two ways -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def wire(
    *services: Service,
    policy: ServerPolicy = QUICK_STOP,
    security: ClientSecurity = NO_SECURITY,
    tracer: Tracer = SILENT_TRACER,
) -> AsyncIterator[tuple[RunningServer, PeerChannel]]:
    async with serve(services, "127.0.0.1:0", SilentMeter(), policy, tracer=tracer) as server:
        channel = open_channel(server.address, security, tracer=tracer)
        try:
            yield server, channel
        finally:
            await channel.close()


@asynccontextmanager
async def _joined(
    way: str, domain: T, service: Callable[[T], Service], client: Callable[[PeerChannel], T]
) -> AsyncIterator[T]:
    if way == "direct":
        yield domain
        return
    async with wire(service(domain)) as (_, channel):
        yield client(channel)


def planner(way: str, domain: PlannerApi) -> AbstractAsyncContextManager[PlannerApi]:
    return _joined(way, domain, planner_service, PlannerClient)


def prefill(way: str, domain: PrefillApi) -> AbstractAsyncContextManager[PrefillApi]:
    return _joined(way, domain, prefill_service, PrefillClient)


def receiver(way: str, domain: KvReceiverApi) -> AbstractAsyncContextManager[KvReceiverApi]:
    return _joined(way, domain, kvreceiver_service, KvReceiverClient)


def directory(way: str, domain: DirectoryApi) -> AbstractAsyncContextManager[DirectoryApi]:
    return _joined(way, domain, directory_service, DirectoryClient)


def served_decode(
    domain: DecodeApi,
    policy: LinkPolicy = PATIENT,
    pulse: Callable[[], EnginePulse] = lambda: EnginePulse(0, 0),
    epoch: int = EPOCH,
    tracer: Tracer = SILENT_TRACER,
) -> Service:
    return decode_service(domain, worker_id="decode-0", epoch=epoch, pulse=pulse, policy=policy, tracer=tracer)


def link_to(
    address: str,
    policy: LinkPolicy = PATIENT,
    epoch: int = EPOCH,
    token: str = "",
    tracer: Tracer = SILENT_TRACER,
) -> DecodeLink:
    worker = Candidate("decode-0", address, epoch)
    return DecodeLink(worker, gateway_id="gateway-0", policy=policy, security=ClientSecurity(token), tracer=tracer)


@asynccontextmanager
async def decode(way: str, domain: DecodeApi, policy: LinkPolicy = PATIENT) -> AsyncIterator[DecodeApi]:
    if way == "direct":
        yield domain
        return
    async with wire(served_decode(domain, policy)) as (server, _), link_to(server.address, policy) as link:
        yield link


def raw(channel: grpc.aio.Channel, method: str) -> Callable[..., Any]:
    """A unary call that sends bytes as they are."""
    untyped: Any = channel
    return untyped.unary_unary(method)


class PingCount:
    """Counts the pings in the HTTP/2 frames that a client sends; answers to the server's pings do not count."""

    PREFACE_BYTES = 24
    HEADER_BYTES = 9  # length (3), type, flags, stream (4): RFC 9113, section 4.1
    PING, ACK = 6, 1

    def __init__(self) -> None:
        self.pings = 0
        self._seen = bytearray()
        self._next_frame = self.PREFACE_BYTES

    def add(self, data: bytes) -> None:
        self._seen += data
        while len(self._seen) >= self._next_frame + self.HEADER_BYTES:
            header = self._seen[self._next_frame : self._next_frame + self.HEADER_BYTES]
            self.pings += header[3] == self.PING and not header[4] & self.ACK
            self._next_frame += self.HEADER_BYTES + int.from_bytes(header[:3])


class Relay:
    """A TCP relay that can stop passing bytes while both connections stay open, as SIGSTOP looks from outside."""

    def __init__(self, server: RunningServer) -> None:
        self._target = server.port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sent: list[PingCount] = []

    async def __aenter__(self) -> Relay:
        self._relay = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._relay.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._relay.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def freeze(self) -> None:
        self._flowing.clear()

    @property
    def pings(self) -> int:
        """Keepalive pings that came from clients, over all connections."""
        return sum(count.pings for count in self._sent)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        sent = PingCount()
        self._sent.append(sent)
        for source, sink, count in ((reader, far_writer, sent), (far_reader, writer, None)):
            task = asyncio.create_task(self._pump(source, sink, count))
            self._tasks.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, count: PingCount | None) -> None:
        try:
            while data := await source.read(65536):
                if count is not None:
                    count.add(data)
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()


# --- waiting ----------------------------------------------------------------------------------------------------------


async def soon(waited_for: Awaitable[R]) -> R:
    async with asyncio.timeout(PATIENCE):
        return await waited_for


async def until(holds: Callable[[], bool]) -> None:
    """Poll until ``holds()``; the generous deadline turns a hang into a failure."""

    async def poll() -> None:
        while not holds():
            await asyncio.sleep(0.005)

    await soon(poll())
