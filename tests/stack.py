"""The whole system in one process: real services over fake (or given) engines, joined directly or over gRPC.

``async with Stack(prefill=2, decode=2) as stack`` gives every part by name, a way to run requests, switches that hold
or break it at each stage, and ``assert_idle`` with the invariants that must hold after every test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from baton.core.clock import CountingIds, SystemClock
from baton.core.streams import closing
from baton.core.telemetry import SilentMeter
from baton.core.types import (
    Candidate,
    DecodeRequest,
    PlanQuery,
    Principal,
    ProcessRecord,
    Role,
    TokenChunk,
    TokenRequest,
    WorkerState,
)
from baton.engine.client import threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.runner import Runner
from baton.engine.sharedpool import shared_pool_memory
from baton.state.refusals import MemoryRefusals
from baton.state.registry import MemoryRegistry
from gateway.fleet import FleetView
from gateway.parts import build_gateway
from gateway.prompt import ModelText, Prompts
from gateway.refusal_log import RefusalLog
from gateway.relay import RelayPolicy
from gateway.service import Gateway, GatewayPolicy
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.tier_peer import NoTier, Tiers
from services.kvtransfer.transports import open_transports
from services.planner.config import PlannerConfig
from services.planner.service import Planner
from services.worker.parts import build_parts
from tests.answers import Answer, tokens
from tests.gates import GENEROUS_SECONDS, OfferGate, StepGate
from tests.networks import DirectNetwork, Network, StackWorker, WireNetwork
from tests.quotas import memory_admission

ALWAYS_REMOTE = PlannerConfig(local_prefill_max_tokens=0)
TWO_BLOCKS = 2 * 16 * 16  # bytes
SMALL_MESSAGES = KvTransferConfig(
    max_message_bytes=TWO_BLOCKS,
    max_mapped_bytes=TWO_BLOCKS,
    max_device_bytes=TWO_BLOCKS,
    max_link_bytes=TWO_BLOCKS,
    acknowledge_seconds=GENEROUS_SECONDS,
)
PRINCIPAL = Principal("acme", "tests", salt=b"salt of acme")
ENGINE = EngineConfig(kv_blocks=128, block_size=16, max_step_tokens=64, max_running=16)


@dataclass
class Stack:
    """See the module. Threshold 0 (the default here) sends every prompt to a prefill worker."""

    steps_ahead: ClassVar[int] = 0  # of the fake engines; a test module may run under both

    transports: ClassVar[tuple[str, ...]] = ("shm", "tcp")  # that its workers may use
    local_calls: ClassVar[bool] = False  # True: offers and confirmations go past ``network``, from door to door
    fake_pool: ClassVar[str] = "shared"  # or "device": what the pools of its fake engines look like

    prefill: int = 1
    decode: int = 1
    engine: EngineConfig = ENGINE
    kvtransfer: KvTransferConfig = SMALL_MESSAGES
    policy: PlannerConfig = ALWAYS_REMOTE
    decode_engine: EngineConfig | None = None  # None: as those of the prefill workers
    runner: Callable[[EngineConfig, StepGate], Runner] | None = None
    network: Callable[[], Network] = DirectNetwork
    tiers: Tiers = field(default_factory=NoTier)
    texts: dict[str, ModelText] = field(default_factory=dict)  # tokenizers by model name, for the gateway
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by worker id
    workers: dict[str, StackWorker] = field(default_factory=dict)

    async def __aenter__(self) -> Stack:
        self._before = asyncio.all_tasks()
        self.joined = self.network()
        self.registry = MemoryRegistry(SystemClock())
        self._planner = Planner(self.registry, self.policy, meter=SilentMeter(), clock=SystemClock())
        self.planner = await self.joined.planner(self._planner)
        self.fleet = FleetView(SystemClock())
        self.gateway = self._gateway()
        for role, count in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode)):
            for index in range(count):
                await self.add_worker(f"{role}-{index}", role)
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.gate.release()
        await self.joined.aclose()
        for worker in self.workers.values():
            await worker.life.aclose()

    # --- building -----------------------------------------------------------------------------------------------------

    async def add_worker(self, worker_id: str, role: Role, *, epoch: int = 0) -> StackWorker:
        """Start a worker; with the id of a dead one it takes its place, under another epoch."""
        life, gate = AsyncExitStack(), StepGate()
        config = (self.decode_engine or self.engine) if role is Role.DECODE else self.engine
        runner = self._fake_runner(config, gate) if self.runner is None else self.runner(config, gate)
        engine = await life.enter_async_context(threaded_engine(runner, config))
        address = life.enter_context(self.joined.address(worker_id))
        me = Candidate(worker_id, address, epoch or 1000 + len(self.workers))
        kvtransfer = replace(self.kvtransfer, transports=self.transports, local_calls=self.local_calls)
        transports = life.enter_context(open_transports(engine, worker_id, me.epoch, kvtransfer))
        parts = build_parts(
            engine,
            me,
            receivers=self.joined.receiver,
            prefill_peers=self.joined.prefill,
            transports=transports,
            kvtransfer=kvtransfer,
            meter=SilentMeter(),
            clock=SystemClock(),
            tiers=self.tiers,
        )
        offers = OfferGate(parts.receiver)
        transports.receive(offers)
        worker = StackWorker(me, role, engine, gate, parts, offers, life, runner)
        self.workers[worker_id] = worker
        await self.joined.join(worker)
        await self.heartbeat()
        return worker

    def _fake_runner(self, config: EngineConfig, gate: StepGate) -> Runner:
        card = fake_card(block_size=config.block_size)
        memory = shared_pool_memory(config.kv_blocks, card.format)
        shared, device = (memory, None) if self.fake_pool == "shared" else (None, memory)
        blocks, ahead = config.kv_blocks, self.steps_ahead
        return FakeRunner(card, blocks, steps_ahead=ahead, on_step=gate, memory=shared, device=device)

    def _gateway(self) -> Gateway:
        clock = SystemClock()
        return build_gateway(
            fleet=self.fleet,
            prompts=Prompts(self.texts),
            admission=memory_admission(clock),
            refusals=RefusalLog(MemoryRefusals(), clock, SilentMeter()),
            planner=self.planner,
            links=self.joined.decode,
            meter=SilentMeter(),
            clock=clock,
            ids=CountingIds(),
            policy=GatewayPolicy(),
            relay=RelayPolicy(),
            planner_budget_seconds=GENEROUS_SECONDS,
        )

    async def heartbeat(self) -> None:
        """What each worker's heartbeat does, at once, and a fresh look by the planner."""
        for worker in self.workers.values():
            state = WorkerState.DEAD if worker.dead else WorkerState.READY
            record = ProcessRecord(
                worker.me.worker_id,
                worker.role,
                worker.me.address,
                worker.me.epoch,
                pid=1,
                state=state,
                card=worker.engine.card,
                stats=worker.stats,
                labels=self.labels.get(worker.me.worker_id, ()),
            )
            await self.registry.register(record, ttl=3600)
        await self._planner.refresh()
        self.fleet.update(await self.registry.processes())

    async def kill(self, worker_id: str) -> None:
        """The worker's engine ends and nobody can reach the worker any more; the registry does not know yet.

        An engine that is held at a step ends there: nothing of that step comes out.
        """
        worker = self.workers[worker_id]
        worker.dead = True
        ending = asyncio.gather(worker.life.aclose(), self.joined.cut(worker))
        await self.until(worker.engine._ended.is_set, f"{worker_id} has lost its engine")
        worker.gate.release()
        await ending

    # --- running ------------------------------------------------------------------------------------------------------

    def candidate(self, worker_id: str) -> Candidate:
        return self.workers[worker_id].me

    @asynccontextmanager
    async def stream(self, request: TokenRequest, **changes: Any) -> AsyncIterator[AsyncIterator[TokenChunk]]:
        """Plan and open one request; ``changes`` replace fields of the DecodeRequest."""
        query = PlanQuery(
            request.request_id,
            self.engine.served_name or "fake",
            request.tenant,
            len(request.prompt),
            request.stop.max_tokens,
            tier=request.tier,
        )
        plan = await self.planner.plan(query)
        directed = DecodeRequest(request, plan.prefill, plan.local_prefill_max_tokens, plan.prefill_wait)
        decode = self.joined.decode(plan.decode[0])
        async with closing(decode.generate(replace(directed, **changes))) as chunks:
            yield chunks

    async def generate(self, request: TokenRequest, **changes: Any) -> Answer:
        """One request from its plan to its last chunk."""
        answer = Answer()
        async with asyncio.timeout(GENEROUS_SECONDS), self.stream(request, **changes) as chunks:
            async for chunk in chunks:
                answer = answer.plus(chunk)
        assert answer.finish is not None, "the stream ended without a last chunk"
        return answer

    async def alone(self, request: TokenRequest) -> Answer:
        """What one engine by itself answers, on a stack of its own: the truth to compare with."""
        local = replace(self, prefill=0, decode=1, workers={}, network=DirectNetwork, tiers=NoTier())
        async with local:
            return await local.generate(request)

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Poll until ``holds``; a failed assertion names ``what`` was waited for."""
        for _ in range(int(GENEROUS_SECONDS / 0.002)):
            if holds():
                return
            await asyncio.sleep(0.002)
        raise AssertionError(f"never happened: {what}")

    async def assert_idle(self) -> None:
        """The invariants after every test: nothing held, nothing lost, no open ticket, no task left."""
        for worker in self.workers.values():
            if worker.dead:
                continue
            await self.until(lambda w=worker: w.stats.held_blocks == 0, f"{worker.me.worker_id} holds no block")
            stats = worker.stats
            assert stats.free_blocks + stats.held_blocks + stats.cached_blocks == stats.total_blocks
            assert (stats.waiting, stats.running) == (0, 0)
            assert worker.parts.receiver.open_tickets == 0
        await self.until(lambda: not self._stray_tasks(), f"no task left: {self._stray_tasks()}")

    def _stray_tasks(self) -> list[str]:
        """Tasks that our services began and that still run."""
        tasks = [task for task in asyncio.all_tasks() - self._before if not task.done()]
        code = [getattr(task.get_coro(), "cr_code", None) for task in tasks]
        return [
            each.co_qualname for each in code if each and {"services", "gateway"} & set(Path(each.co_filename).parts)
        ]


__all__ = ["ENGINE", "PRINCIPAL", "Answer", "OfferGate", "Stack", "StackWorker", "StepGate", "WireNetwork", "tokens"]
