"""The whole system in one process: real services over fake (or given) engines, joined directly.

``async with Stack(prefill=2, decode=2) as stack`` gives every part by name, a way to run requests, switches that hold
or break it at each stage, and ``assert_idle`` with the invariants that must hold after every test.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from baton.core.api import EngineApi, KvReceiverApi, PrefillApi
from baton.core.clock import SystemClock
from baton.core.errors import PeerUnavailable
from baton.core.streams import closing
from baton.core.telemetry import SilentMeter
from baton.core.types import (
    Attempt,
    Candidate,
    DecodeRequest,
    EngineStats,
    KvChunk,
    KvConfirmation,
    KvHandshake,
    Placement,
    PlanQuery,
    ProcessRecord,
    Role,
    Sampling,
    StopRules,
    Ticket,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    Usage,
    WorkerState,
)
from baton.engine.client import threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.runner import Part, Runner
from baton.state.registry import MemoryRegistry
from services.kvtransfer.config import KvTransferConfig
from services.planner.config import PlannerConfig
from services.planner.service import Planner
from services.worker.parts import WorkerParts, build_parts

GENEROUS_SECONDS = 30.0
ALWAYS_REMOTE = PlannerConfig(local_prefill_max_tokens=0)
SMALL_MESSAGES = KvTransferConfig(max_message_bytes=2 * 16 * 16, acknowledge_seconds=GENEROUS_SECONDS)  # 2 blocks each
ENGINE = EngineConfig(kv_blocks=128, block_size=16, max_step_tokens=64, max_running=16)


class StepGate:
    """An engine's ``on_step`` hook that can hold the engine before a step which does what a test waits for."""

    def __init__(self) -> None:
        self._wanted: Callable[[Sequence[Part]], bool] | None = None
        self._reached = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self.steps: list[tuple[tuple[int, int], ...]] = []  # (start, end) of each part of each step

    def __call__(self, parts: Sequence[Part]) -> None:
        self.steps.append(tuple((part.start, len(part.context)) for part in parts))
        if self._wanted is not None and self._wanted(parts):
            self._wanted = None
            self._reached.set()
            self._open.wait(GENEROUS_SECONDS)

    def hold(self, wanted: Callable[[Sequence[Part]], bool] = lambda _: True) -> None:
        """Stop before the next step whose parts are ``wanted``."""
        self._reached.clear()
        self._open.clear()
        self._wanted = wanted

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, GENEROUS_SECONDS), "the engine never came to the step"

    def release(self) -> None:
        self._wanted = None
        self._open.set()


class OfferGate:
    """Wraps a receiver: may hold offers, change chunks, or fail, as ``on_offer`` decides before each is passed on."""

    def __init__(self, inner: KvReceiverApi) -> None:
        self.inner = inner
        self.on_offer: Callable[[KvChunk], Any] | None = None
        self.offers: list[KvChunk] = []

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return await self.inner.handshake(hello)

    async def offer(self, chunk: KvChunk) -> None:
        self.offers.append(chunk)
        if self.on_offer is not None:
            changed = self.on_offer(chunk)
            chunk = await changed if asyncio.iscoroutine(changed) else changed
        await self.inner.offer(chunk)

    async def confirm(self, confirmation: KvConfirmation) -> None:
        await self.inner.confirm(confirmation)


@dataclass
class StackWorker:
    """One worker of the stack."""

    me: Candidate
    role: Role
    engine: EngineApi
    gate: StepGate
    parts: WorkerParts
    offers: OfferGate
    life: AsyncExitStack
    dead: bool = False

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats


@dataclass(frozen=True)
class Answer:
    """All that a request yielded, put together."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish: Any = None
    usage: Usage | None = None
    placement: Placement | None = None

    def plus(self, chunk: TokenChunk) -> Answer:
        assert self.finish is None, "a chunk came after the last one"
        return Answer(
            self.token_ids + chunk.token_ids,
            self.logprobs + chunk.logprobs,
            self.prompt_logprobs + chunk.prompt_logprobs,
            chunk.finish,
            chunk.usage or self.usage,
            chunk.placement or self.placement,
        )

    @property
    def content(self) -> tuple[object, ...]:
        """What has to be equal wherever the request was computed."""
        return (self.token_ids, self.logprobs, self.prompt_logprobs, self.finish)


def tokens(
    length: int, *, request_id: str = "r", first: int = 3, max_tokens: int = 12, seed: int = 0, **fields: Any
) -> TokenRequest:
    """A request with a prompt of ``length`` ids that differ with ``first``. Greedy unless ``seed`` is given."""
    prompt = tuple((first + 7 * index) % 500 + 3 for index in range(length))
    sampling = Sampling(temperature=0.8, seed=seed) if seed else Sampling()
    stop = StopRules(max_tokens=max_tokens, ignore_eos=True)
    return TokenRequest(request_id, prompt, sampling=sampling, stop=fields.pop("stop", stop), **fields)


@dataclass
class Stack:
    """See the module. Threshold 0 (the default here) sends every prompt to a prefill worker."""

    prefill: int = 1
    decode: int = 1
    engine: EngineConfig = ENGINE
    kvtransfer: KvTransferConfig = SMALL_MESSAGES
    policy: PlannerConfig = ALWAYS_REMOTE
    runner: Callable[[EngineConfig, StepGate], Runner] | None = None
    workers: dict[str, StackWorker] = field(default_factory=dict)

    async def __aenter__(self) -> Stack:
        self._life = AsyncExitStack()
        self._before = asyncio.all_tasks()
        self.registry = MemoryRegistry(SystemClock())
        self.planner = Planner(self.registry, self.policy, meter=SilentMeter(), clock=SystemClock())
        for role, count in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode)):
            for index in range(count):
                await self.add_worker(f"{role}-{index}", role)
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.gate.release()
            await worker.life.aclose()
        await self._life.aclose()

    # --- building -----------------------------------------------------------------------------------------------------

    async def add_worker(self, worker_id: str, role: Role, *, epoch: int = 0) -> StackWorker:
        """Start a worker; with the id of a dead one it takes its place, under another epoch."""
        life, gate = AsyncExitStack(), StepGate()
        runner = self._fake_runner(gate) if self.runner is None else self.runner(self.engine, gate)
        engine = await life.enter_async_context(threaded_engine(runner, self.engine))
        me = Candidate(worker_id, f"{worker_id}:1", epoch or 1000 + len(self.workers))
        parts = build_parts(
            engine,
            me,
            receivers=self._receiver,
            prefill_peers=self._prefill_peer,
            kvtransfer=self.kvtransfer,
            meter=SilentMeter(),
            clock=SystemClock(),
        )
        worker = StackWorker(me, role, engine, gate, parts, OfferGate(parts.receiver), life)
        self.workers[worker_id] = worker
        await self.heartbeat()
        return worker

    def _fake_runner(self, gate: StepGate) -> Runner:
        card = fake_card(block_size=self.engine.block_size)
        return FakeRunner(card, self.engine.kv_blocks, on_step=gate)

    def _at(self, address: str) -> StackWorker:
        for worker in self.workers.values():
            if worker.me.address == address and not worker.dead:
                return worker
        raise PeerUnavailable(f"{address}: connection refused")

    def _receiver(self, ticket: Ticket) -> KvReceiverApi:
        return self._at(ticket.receiver_address).offers

    def _prefill_peer(self, candidate: Candidate) -> PrefillApi:
        return self._at(candidate.address).parts.prefill

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
            )
            await self.registry.register(record, ttl=3600)
        await self.planner.refresh()

    async def kill(self, worker_id: str) -> None:
        """The worker's engine ends and nobody can reach the worker any more; the registry does not know yet."""
        worker = self.workers[worker_id]
        worker.dead = True
        worker.gate.release()
        await worker.life.aclose()

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
        )
        plan = await self.planner.plan(query)
        directed = DecodeRequest(request, plan.prefill, plan.local_prefill_max_tokens)
        decode = self._at(plan.decode[0].address).parts.decode
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
        local = replace(self, prefill=0, decode=1, workers={})
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
        known = ("engine", "gateway", "decode link")
        return [
            str(task.get_coro())
            for task in asyncio.all_tasks() - self._before
            if not task.done() and not any(name in task.get_name() for name in known)
        ]


__all__ = ["Answer", "Attempt", "OfferGate", "Stack", "StackWorker", "StepGate", "tokens"]
