"""How the parts of a ``Stack`` reach each other: directly, or over gRPC on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from baton.core.api import DecodeApi, KvReceiverApi, PlannerApi, PrefillApi
from baton.core.errors import PeerUnavailable
from baton.core.reserved_port import reserved_port
from baton.core.telemetry import SilentMeter
from baton.core.types import Candidate, EngineStats, PrefillRequest, PrefillResult, Role, Ticket
from baton.engine.client import EngineClient
from baton.engine.runner import Runner
from baton.rpc.channels import ChannelPool, ClientSecurity
from baton.rpc.decode_link import DecodeLink
from baton.rpc.decode_service import decode_service
from baton.rpc.kvreceiver import KvReceiverClient, kvreceiver_service
from baton.rpc.link import EnginePulse
from baton.rpc.planner import PlannerClient, planner_service
from baton.rpc.prefill import PrefillClient, prefill_service
from baton.rpc.serving import ServerPolicy, Service, serve
from services.worker.parts import WorkerParts
from tests.gates import OfferGate, StepGate

TOKEN = "a-token-for-tests"


@dataclass
class StackWorker:
    """One worker of a stack. ``life`` ends its engine and whatever serves it."""

    me: Candidate
    role: Role
    engine: EngineClient
    gate: StepGate
    parts: WorkerParts
    offers: OfferGate
    life: AsyncExitStack
    runner: Runner
    dead: bool = False

    @property
    def engine_calls(self) -> int:
        """Reservations and prefills that this worker's front has open in its engine."""
        return len(self.engine._calls)

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats


NetworkFactory = Callable[[], "Network"]


class Network(Protocol):
    def address(self, worker_id: str) -> AbstractContextManager[str]:
        """The address of a worker to be, held for it."""
        ...

    async def join(self, worker: StackWorker) -> None:
        """From now on the others can reach the worker."""
        ...

    async def cut(self, worker: StackWorker) -> None:
        """Nobody can reach the worker any more; calls that run on it fail."""
        ...

    def decode(self, candidate: Candidate) -> DecodeApi: ...

    def prefill(self, candidate: Candidate) -> PrefillApi: ...

    def receiver(self, ticket: Ticket) -> KvReceiverApi: ...

    async def planner(self, planner: PlannerApi) -> PlannerApi:
        """The planner as its callers see it."""
        ...

    async def aclose(self) -> None: ...


class DirectNetwork:
    """Calls the objects themselves."""

    def __init__(self) -> None:
        self._workers: dict[str, StackWorker] = {}

    @contextmanager
    def address(self, worker_id: str) -> Iterator[str]:
        yield f"{worker_id}:1"

    async def join(self, worker: StackWorker) -> None:
        self._workers[worker.me.address] = worker

    async def cut(self, worker: StackWorker) -> None:
        del self._workers[worker.me.address]

    def decode(self, candidate: Candidate) -> DecodeApi:
        return self._at(candidate.address).parts.decode

    def prefill(self, candidate: Candidate) -> PrefillApi:
        return self._at(candidate.address).parts.prefill

    def receiver(self, ticket: Ticket) -> KvReceiverApi:
        return self._at(ticket.receiver_address).offers

    async def planner(self, planner: PlannerApi) -> PlannerApi:
        return planner

    async def aclose(self) -> None:
        self._workers.clear()

    def _at(self, address: str) -> StackWorker:
        if address not in self._workers:
            raise PeerUnavailable(f"{address}: connection refused")
        return self._workers[address]


@dataclass(frozen=True)
class _PrefillOf:
    """What the worker's ``parts.prefill`` is at the time of the call, so that a test may replace it."""

    worker: StackWorker

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        return await self.worker.parts.prefill.prefill(request)


class WireNetwork:
    """Real gRPC servers, channels and links on loopback, with the services' shared token."""

    def __init__(self) -> None:
        self._security = ClientSecurity(TOKEN)
        self._channels = ChannelPool(self._security)
        self._links: dict[Candidate, DecodeLink] = {}
        self._servers: dict[str, AsyncExitStack] = {}

    @contextmanager
    def address(self, worker_id: str) -> Iterator[str]:
        with reserved_port("127.0.0.1", 0) as port:
            yield f"127.0.0.1:{port}"

    async def join(self, worker: StackWorker) -> None:
        def pulse() -> EnginePulse:
            return EnginePulse(worker.stats.steps, worker.parts.decode.computing)

        services = [
            decode_service(worker.parts.decode, worker_id=worker.me.worker_id, epoch=worker.me.epoch, pulse=pulse),
            prefill_service(_PrefillOf(worker)),
            kvreceiver_service(worker.offers),
        ]
        await self._serve(worker.me.address, services)

    async def cut(self, worker: StackWorker) -> None:
        await self._servers.pop(worker.me.address).aclose()

    def decode(self, candidate: Candidate) -> DecodeApi:
        if candidate not in self._links:
            self._links[candidate] = DecodeLink(candidate, gateway_id="tests", security=self._security)
        return self._links[candidate]

    def prefill(self, candidate: Candidate) -> PrefillApi:
        return PrefillClient(self._channels.get(candidate.address))

    def receiver(self, ticket: Ticket) -> KvReceiverApi:
        return KvReceiverClient(self._channels.get(ticket.receiver_address))

    async def planner(self, planner: PlannerApi) -> PlannerApi:
        address = await self._serve("127.0.0.1:0", [planner_service(planner)])
        return PlannerClient(self._channels.get(address))

    async def aclose(self) -> None:
        for link in self._links.values():
            await link.aclose()
        await self._channels.aclose()
        for server in self._servers.values():
            await server.aclose()

    async def _serve(self, address: str, services: list[Service]) -> str:
        life = AsyncExitStack()
        policy = ServerPolicy(token=TOKEN, drain=0.0)
        server = await life.enter_async_context(serve(services, address, SilentMeter(), policy))
        self._servers[server.address] = life
        return server.address
