"""A small fleet for the gateway's tests: workers that draw a fixed function of the ids, and fail on script."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from baton.core.clock import CountingIds, SystemClock
from baton.core.errors import BatonError, Overloaded, PeerUnavailable
from baton.core.telemetry import Meter, SilentMeter
from baton.core.types import (
    CachePolicy,
    Candidate,
    ChatMessage,
    DecodeRequest,
    EngineStats,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    KvFormat,
    ModelCard,
    Placement,
    Plan,
    PlanLimits,
    PlanQuery,
    PrefillMode,
    Principal,
    ProcessRecord,
    Role,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    Usage,
    WorkerState,
)
from baton.state.quota.memory import MemoryQuota
from baton.state.refusals import MemoryRefusals
from baton.state.tenancy import MemoryTenancy
from baton.text.tokenizer import Tokenizer
from baton.text.vocabulary import parse_decoder
from gateway.fleet import FleetView
from gateway.keys import KeyRing, new_key
from gateway.parts import build_gateway
from gateway.prompt import ModelText, Prompts
from gateway.refusal_log import RefusalLog
from gateway.relay import RelayPolicy
from gateway.service import GatewayPolicy
from tests.quotas import file_callers, memory_admission

MODEL = "toy"
EOS = 256
VOCAB = 257
CONTEXT = 512
FORMAT = KvFormat("fake", 16, 1, 1, 1)
CARD = ModelCard(MODEL, "fake", CONTEXT, VOCAB, "hash", FORMAT, eos_token_ids=(EOS,))


def byte_tokenizer() -> Tokenizer:
    """One token a byte, ids in the order of the byte-level alphabet, then an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    pieces = parse_decoder({"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True})
    return Tokenizer(backend, pieces, special_ids=frozenset({EOS}), eos_ids=(EOS,))


def draw(seed: int, context: Sequence[int]) -> int:
    """The token that follows ``context``: the same on every worker, as a deterministic engine's is."""
    digest = hashlib.blake2b(repr((seed, tuple(context))).encode(), digest_size=4).digest()
    value = int.from_bytes(digest, "little")
    return EOS if value % 97 == 0 else value % 251


def spelling(tokenizer: Tokenizer, text: str) -> Callable[[int, Sequence[int]], int]:
    """A draw that spells ``text`` over and over, whatever the seed, for prompts of one token."""
    ids = tokenizer.encode(text)
    return lambda seed, context: ids[(len(context) - 1) % len(ids)]


@dataclass
class Fault:
    """After ``after`` tokens of one call, raise ``error``, or end the stream without a word when it is None."""

    after: int
    error: BatonError | None = field(default_factory=lambda: PeerUnavailable("the worker is gone"))


class ScriptedDecode:
    """A decode worker. Its n-th call follows the n-th entry of ``faults`` (None: no fault)."""

    def __init__(
        self,
        worker_id: str,
        faults: Sequence[Fault | None] = (),
        *,
        step: int = 1,
        drawn: Callable[[int, Sequence[int]], int] = draw,
    ) -> None:
        self.worker_id = worker_id
        self.requests: list[DecodeRequest] = []
        self.open = 0
        self.hang_after: int | None = None
        self.sent = 0
        self._faults = list(faults)
        self._step = step
        self._drawn = drawn

    async def generate(self, request: DecodeRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        fault = self._faults.pop(0) if self._faults else None
        self.open += 1
        try:
            sent = 0
            for chunk in self._chunks(request.tokens):
                if fault is not None and sent >= fault.after:
                    if fault.error is not None:
                        raise fault.error
                    return
                if self.hang_after is not None and sent >= self.hang_after:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                sent += len(chunk.token_ids)
                self.sent += len(chunk.token_ids)
                yield chunk
        finally:
            self.open -= 1

    def _chunks(self, request: TokenRequest) -> list[TokenChunk]:
        chunks: list[TokenChunk] = []
        ids = list(request.generated)
        usage = Usage(len(request.prompt), 16 * (len(request.generated) > 0), len(ids))
        placement = Placement(self.worker_id, f"prefill-of-{self.worker_id}", PrefillMode.REMOTE, 100)
        prompt_logprobs = () if request.prompt_logprobs is None else (None,) * len(request.prompt)
        first = TokenChunk(prompt_logprobs=prompt_logprobs, usage=usage, placement=placement)
        finish = None
        while finish is None:
            new: list[int] = []
            while len(new) < self._step and finish is None:
                token = self._drawn(request.sampling.seed, (*request.prompt, *ids))
                ids.append(token)
                new.append(token)
                finish = self._finish(request, ids)
            logprobs = () if request.logprobs is None else tuple(TokenLogprob(t, -t / 100) for t in new)
            base, first = first, TokenChunk()
            chunks.append(replace(base, token_ids=tuple(new), logprobs=logprobs, finish=finish))
        return chunks

    def _finish(self, request: TokenRequest, ids: Sequence[int]) -> FinishReason | None:
        stop = request.stop
        ends = set(stop.stop_token_ids) | (set() if stop.ignore_eos else {EOS})
        if ids[-1] in ends and len(ids) > stop.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= stop.max_tokens else None


class RankedPlanner:
    """Plans in the order of its workers, without those to avoid."""

    def __init__(self, workers: Sequence[str], *, silent: bool = False) -> None:
        self.workers = list(workers)
        self.queries: list[PlanQuery] = []
        self.silent = silent
        self.speculation = True
        self.error: BatonError | None = None
        self.attention_window: int | None = None
        self.limits = PlanLimits()
        self.cache = CachePolicy()

    async def plan(self, query: PlanQuery) -> Plan:
        self.queries.append(query)
        if self.silent:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        left = tuple(candidate(worker) for worker in self.workers if worker not in query.avoid)
        if not left:
            raise Overloaded("no ready worker", retry_after=0.5)
        window, speculation = self.attention_window, self.speculation
        prefill = (candidate("prefill-0"),)
        return Plan(
            left, prefill, 0, attention_window=window, speculation=speculation, limits=self.limits, cache=self.cache
        )


def candidate(worker_id: str, epoch: int = 1) -> Candidate:
    return Candidate(worker_id, f"{worker_id}:1", epoch)


def record(worker_id: str, *, role: Role = Role.DECODE, load: int = 0, card: ModelCard = CARD) -> ProcessRecord:
    stats = EngineStats(total_blocks=10, free_blocks=10, running=load)
    return ProcessRecord(worker_id, role, f"{worker_id}:1", 1, 1, state=WorkerState.READY, card=card, stats=stats)


class Fleet:
    """A gateway over scripted workers, and the key of a caller."""

    def __init__(
        self,
        *workers: ScriptedDecode,
        planner: RankedPlanner | None = None,
        policy: GatewayPolicy | None = None,
        relay: RelayPolicy | None = None,
        text: bool = True,
        meter: Meter | None = None,
        key_models: tuple[str, ...] | None = None,
    ) -> None:
        self.workers = {worker.worker_id: worker for worker in workers}
        self.planner = planner or RankedPlanner(list(self.workers))
        clock = SystemClock()
        self.view = FleetView(clock)
        self.view.update([record(worker_id) for worker_id in self.workers])
        self.key, stored = new_key("local", "acme", key_models)
        self.keys = KeyRing("0" * 64, [stored])
        self.tenancy = MemoryTenancy()
        self.callers = file_callers(self.keys, self.tenancy)
        self.quota, self.refusals = MemoryQuota(clock), MemoryRefusals()
        self.caller: Principal = self.keys.authenticate(self.key)
        self.tokenizer = byte_tokenizer()
        texts = {MODEL: ModelText(self.tokenizer, _render)} if text else {}
        self.gateway = build_gateway(
            fleet=self.view,
            prompts=Prompts(texts),
            admission=memory_admission(clock, meter, self.quota),
            refusals=RefusalLog(self.refusals, clock, meter or SilentMeter()),
            planner=self.planner,
            links=lambda where: self.workers[where.worker_id],
            meter=meter or SilentMeter(),
            clock=clock,
            ids=CountingIds(),
            policy=policy or GatewayPolicy(),
            relay=relay or RelayPolicy(4, 0.3),
            planner_budget_seconds=0.05,
        )

    async def ask(self, request: GenerateRequest) -> list[GenerateChunk]:
        return [chunk async for chunk in self.gateway.generate(request, self.caller)]

    def assert_idle(self) -> None:
        assert {worker.worker_id: worker.open for worker in self.workers.values()} == dict.fromkeys(self.workers, 0)
        assert not any(self.view.running_on(worker_id) for worker_id in self.workers)
        assert self.gateway.running == 0


def _render(messages: Sequence[ChatMessage]) -> str:
    return "".join(f"[{message.role}]{message.content}" for message in messages)


@dataclass(frozen=True)
class Answer:
    """Chunks of one choice, put together."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    usage: Usage | None
    migrations: int


def answer(chunks: Sequence[GenerateChunk], index: int = 0) -> Answer:
    mine = [chunk for chunk in chunks if chunk.index == index]
    assert all(chunk.finish is None for chunk in mine[:-1])
    return Answer(
        ids=tuple(token for chunk in mine for token in chunk.token_ids),
        text="".join(chunk.text for chunk in mine),
        logprobs=tuple(entry for chunk in mine for entry in chunk.logprobs),
        finish=mine[-1].finish,
        usage=mine[-1].usage,
        migrations=mine[-1].migrations,
    )
