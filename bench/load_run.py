"""Clients that put a random load on one engine and keep account of what they were answered."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.core.api import EngineApi, Reservation
from baton.core.clock import Clock
from baton.core.errors import BatonError, Expired, Overloaded
from baton.core.streams import closing
from baton.core.types import FirstToken, TokenRequest
from bench.load_mix import Computed, Errand, LoadMix
from bench.load_record import LoadRecord

FAULTS_KEPT = 100  # the first ones; all are counted
BACK_OFF_SECONDS = 0.2  # of a client that was refused for want of a place


@dataclass
class Account:
    """What became of the requests. ``kept`` is a fair sample of those that finished and are ``worth_keeping``."""

    keep: int
    seed: int
    worth_keeping: Callable[[TokenRequest], bool]
    outcomes: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list[str])
    fault_count: int = 0
    tokens: int = 0
    _eligible: int = 0
    kept: list[LoadRecord] = field(default_factory=list[LoadRecord])

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def fault(self, *found: str) -> None:
        self.fault_count += len(found)
        self.faults += found[: max(0, FAULTS_KEPT - len(self.faults))]

    def finish(self, record: LoadRecord) -> None:
        """Each record that is worth keeping is kept with the same chance (reservoir sampling)."""
        if not self.worth_keeping(record.request):
            return
        self._eligible += 1
        if len(self.kept) < self.keep:
            self.kept.append(record)
        elif (place := self._random.randrange(self._eligible)) < self.keep:
            self.kept[place] = record


class LoadRun:
    """One load on one engine."""

    def __init__(self, engine: EngineApi, mix: LoadMix, clock: Clock, account: Account) -> None:
        self._engine = engine
        self._mix = mix
        self._clock = clock
        self._account = account
        self._block_size = engine.card.format.block_size

    async def client(self, goes_on: Callable[[], bool]) -> None:
        """One request after the other while ``goes_on()``; a request that has begun is seen through."""
        while goes_on():
            errand = self._mix.errand()
            await self._clock.sleep(errand.pause)
            await self._run(errand)

    def check_blocks(self) -> None:
        stats = self._engine.stats
        found = stats.free_blocks + stats.held_blocks + stats.cached_blocks
        if found != stats.total_blocks:
            self._account.fault(f"blocks: {found} of {stats.total_blocks} are accounted for: {stats}")

    async def _run(self, errand: Errand) -> None:
        record = LoadRecord(errand.request)
        stage = Stage()
        seconds = None if errand.departure is None else errand.departure.seconds
        try:
            async with asyncio.timeout(seconds):
                await self._follow(errand, errand.request, record, stage)
        except TimeoutError:
            self._account.outcomes[f"left {stage.name}"] += 1
        except BatonError as error:
            self._on_error(errand, error)
            await self._clock.sleep(BACK_OFF_SECONDS)
        else:
            await self._on_end(errand, record, stage)
        self._account.tokens += len(record.token_ids)

    async def _on_end(self, errand: Errand, record: LoadRecord, stage: Stage) -> None:
        if record.finish is None and errand.departure is not None and errand.departure.resumes:
            self._account.outcomes["resumed"] += 1
            await self._resume(errand, record)
        elif record.finish is None:
            self._account.outcomes[f"left {stage.name}"] += 1
        if record.finish is not None:
            self._account.outcomes[f"finished: {record.finish}"] += 1
            self._account.fault(*record.faults(self._engine.card))
            self._account.finish(record)

    async def _resume(self, errand: Errand, record: LoadRecord) -> None:
        """As after the loss of a worker: a new attempt that is given the tokens that have come."""
        request = replace(errand.request, generated=tuple(record.token_ids), prompt_logprobs=None, timeout=None)
        if not record.token_ids:
            request = replace(request, prompt_logprobs=errand.request.prompt_logprobs)
        try:
            await self._follow(replace(errand, departure=None), request, record, Stage())
        except BatonError as error:
            self._on_error(replace(errand, request=request), error)

    def _on_error(self, errand: Errand, error: BatonError) -> None:
        """Only a full queue and a time limit of the request's own are answers."""
        name = type(error).__name__
        if isinstance(error, Overloaded) or (isinstance(error, Expired) and errand.request.timeout is not None):
            self._account.outcomes[name] += 1
        else:
            self._account.fault(f"{errand.request.request_id}: {name}: {error.message}")

    async def _follow(self, errand: Errand, request: TokenRequest, record: LoadRecord, stage: Stage) -> None:
        first, payload = None, b""
        if errand.computed is Computed.APART:
            stage.name = "prefilling"
            first, payload = await self._prefill(request)
        async with self._engine.reserve(request) as reservation:
            stage.name = "computing"
            if first is not None:
                await self._write(reservation, request, payload)
                record.add_first(first)
            async with closing(reservation.decode(first)) as chunks:
                async for chunk in chunks:
                    stage.name = "decoding"
                    record.add(chunk)
                    if _leaves(errand, record):
                        return

    async def _prefill(self, request: TokenRequest) -> tuple[FirstToken, bytes]:
        """The first token and all blocks of the context."""
        async with self._engine.prefill(request) as run:
            async for _ in run.filled():
                self.check_blocks()
            first = await run.first_token()
            return first, await run.read_blocks(0, -(-request.context_tokens // self._block_size))

    async def _write(self, reservation: Reservation, request: TokenRequest, payload: bytes) -> None:
        """All blocks that the prefix cache did not have."""
        size = self._engine.card.format.block_bytes
        cached = reservation.cached_tokens // self._block_size
        if cached * size < len(payload):
            await reservation.write_blocks(cached, payload[cached * size :])


@dataclass
class Stage:
    """How far a request has come."""

    name: str = "queued"


def _leaves(errand: Errand, record: LoadRecord) -> bool:
    departure = errand.departure
    if departure is None or departure.tokens is None or record.finish is not None:
        return False
    return len(record.token_ids) >= departure.tokens
