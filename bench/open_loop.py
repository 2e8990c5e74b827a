"""Requests that come when they come, whatever the system makes of them: one process's share of an open-loop run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from baton.cli.door import Door
from baton.core.clock import Clock, SystemClock
from baton.core.errors import BatonError
from baton.core.types import GenerateChunk, GenerateRequest, Sampling, StopRules
from bench.arrivals import Arrival, poisson
from bench.metrics import Record, Timeline, Window
from bench.prompts import ArrivalPrompts

WRONG_LENGTH = "WRONG_LENGTH"  # a stream that ended well, with more or fewer tokens than were asked for
LAG_SECONDS = 0.02  # how often the event loop is asked how late it is


@dataclass(frozen=True, slots=True)
class Poisson:
    """Arrivals without end."""

    rate: float
    prompt: int
    output: int

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        return poisson(self.rate, self.prompt, self.output, seed)


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals as they were recorded."""

    recorded: tuple[Arrival, ...]

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        del seed
        return iter(self.recorded)


@dataclass(frozen=True, slots=True)
class Load:
    """A whole run, the same in every process that takes a share of it.

    Requests due inside ``window`` are judged. Those before it warm the system up; those after it keep it under load
    until every judged one has ended, and are then given up.
    """

    door: Door
    model: str
    vocab_size: int
    source: Poisson | Trace
    window: Window
    seed: int  # of arrivals
    prompt_seed: int
    sampling: Sampling
    timeout: float  # seconds for a whole answer


@dataclass(frozen=True, slots=True)
class Share:
    """Every ``of``-th request, from number ``index`` on."""

    index: int
    of: int


@dataclass(frozen=True, slots=True)
class ShareResult:
    """``cpu_share``: of one core, used by this process; ``lag_ms``: the event loop's worst lateness."""

    records: list[Record]
    cpu_share: float
    lag_ms: float


class Streaming(Protocol):
    """The part of ``baton.client.Client`` that is used."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]: ...


class OpenLoop:
    """Sends the requests of one share, each at its time, and follows all of them."""

    def __init__(self, client: Streaming, load: Load, share: Share, clock: Clock, start: float) -> None:
        """``start``: when the run begins, on ``clock``; times of records are seconds since then."""
        self._client = client
        self._load = load
        self._share = share
        self._clock = clock
        self._start = start
        self._prompts = ArrivalPrompts(load.vocab_size, load.prompt_seed)
        self._judged: set[asyncio.Task[None]] = set()
        self._others: set[asyncio.Task[None]] = set()
        self._records: list[Record] = []

    async def run(self) -> list[Record]:
        try:
            await self._send_all()
            await asyncio.gather(*self._judged)
        finally:
            tasks = [*self._judged, *self._others]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._records

    async def _send_all(self) -> None:
        numbered = enumerate(self._load.source.arrivals(self._load.seed))
        for number, arrival in islice(numbered, self._share.index, None, self._share.of):
            request = self._request(number, arrival)
            while (early := arrival.at - self._now()) > 0:
                await self._clock.sleep(early)
            if arrival.at >= self._load.window.end and all(task.done() for task in self._judged):
                return
            record = Record(arrival.at, Timeline(self._now()))
            self._records.append(record)
            task = asyncio.create_task(self._follow(request, record))
            (self._judged if self._load.window.holds(arrival.at) else self._others).add(task)

    def _request(self, number: int, arrival: Arrival) -> GenerateRequest:
        return GenerateRequest(
            model=self._load.model,
            prompt_token_ids=self._prompts.ids(number, arrival),
            sampling=self._load.sampling,
            seed=number,
            stop=StopRules(ignore_eos=True),
            max_tokens=arrival.output,
            timeout=self._load.timeout,
        )

    async def _follow(self, request: GenerateRequest, record: Record) -> None:
        try:
            async with aclosing(self._client.stream(request)) as chunks:
                async for chunk in chunks:
                    record.timeline.add(self._now(), len(chunk.token_ids))
                    record.migrations = max(record.migrations, chunk.migrations)
                    if chunk.usage is not None:
                        record.cached_tokens = chunk.usage.cached_tokens
        except BatonError as error:
            record.error = error.reason
        else:
            record.error = "" if record.timeline.tokens == request.max_tokens else WRONG_LENGTH
        record.ended = self._now()

    def _now(self) -> float:
        return self._clock.now() - self._start


async def run_share(load: Load, share: Share, start: float) -> ShareResult:
    """One share, with a client and a look at this process's own load. ``start``: on the monotonic clock, which the
    processes of a machine have in common."""
    clock = SystemClock()
    cpu, began = time.process_time(), clock.now()
    lags: list[float] = []
    watch = asyncio.create_task(_watch_lag(clock, lags))
    try:
        async with load.door.client() as client:
            records = await OpenLoop(client, load, share, clock, start).run()
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    return ShareResult(records, (time.process_time() - cpu) / (clock.now() - began), 1000 * max(lags, default=0.0))


async def _watch_lag(clock: Clock, lags: list[float]) -> None:
    while True:
        before = clock.now()
        await clock.sleep(LAG_SECONDS)
        lags.append(clock.now() - before - LAG_SECONDS)
