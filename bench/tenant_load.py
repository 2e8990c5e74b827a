"""Tenants that send requests to one engine at their own rates, and what becomes of them."""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from baton.core.clock import Clock, ManualClock, SystemClock
from baton.core.types import StopRules, Tier, TokenRequest
from baton.engine.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.device_copies import DeviceCopies
from baton.engine.drafter import NoDrafts
from baton.engine.messages import Admitted, Event, Failed, First, Prefill, Release, Reserve, StepReport, Streamed
from baton.engine.runner import Part, Runner, RunnerTimes
from baton.engine.sequence import Work
from baton.engine.sharedpool import PoolMemory


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """``rate`` requests a second, a Poisson process of its own, all of ``prompt`` and ``output`` tokens."""

    name: str
    tier: Tier
    rate: float
    prompt: int
    output: int

    def arrivals(self, seconds: float, seed: int) -> Iterator[float]:
        """The same whoever else sends."""
        chance, at = random.Random(f"{seed} {self.name}"), 0.0
        while (at := at + chance.expovariate(self.rate)) < seconds:
            yield at


@dataclass(slots=True)
class TenantFigures:
    """``waits``: seconds from arrival to admission, of whoever was not admitted to the end of the load. ``prompt`` and
    ``drawn`` count tokens computed in the judged part of the load, recomputed ones once."""

    ttfts: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    sent: int = 0
    refused: int = 0
    finished: int = 0
    prompt: int = 0
    drawn: int = 0


class Pace(Protocol):
    """How time passes."""

    @property
    def clock(self) -> Clock: ...

    def stepped(self) -> None:
        """A step has been run."""
        ...

    def idle(self, until: float) -> None:
        """Nothing can be done before ``until``."""
        ...


class FixedSteps:
    """Each step takes the same time, and nothing else takes any."""

    def __init__(self, step_seconds: float) -> None:
        self.clock = ManualClock()
        self._step_seconds = step_seconds

    def stepped(self) -> None:
        self.clock.advance(self._step_seconds)

    def idle(self, until: float) -> None:
        self.clock.advance(max(0.0, until - self.clock.now()))


class RealTime:
    """Steps take what they take."""

    def __init__(self) -> None:
        self.clock = SystemClock()

    def stepped(self) -> None: ...

    def idle(self, until: float) -> None:
        time.sleep(max(0.0, until - self.clock.now()))


@dataclass(slots=True)
class _Sent:
    load: TenantLoad
    at: float
    key: int
    is_admitted: bool = False
    has_token: bool = False
    reached: int = 0  # prompt tokens computed


class LoadTrial:
    """One engine over ``runner`` and all tenants' requests to it, as answers or as prefills (``work``).

    Tokens are counted from ``judged_from`` seconds on.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        loads: Sequence[TenantLoad],
        pace: Pace,
        *,
        work: Work,
        seed: int,
        judged_from: float,
    ) -> None:
        self.figures = {load.name: TenantFigures() for load in loads}
        self._loads = loads
        self._pace = pace
        self._work = work
        self._seed = seed
        self._judged_from = judged_from
        self._vocab_size = runner.card.vocab_size
        self._tokens = random.Random(seed)
        self._began = 0.0
        self._numbers = count(1)
        self._sent: dict[int, _Sent] = {}
        self.core = EngineCore(_Counting(runner, self._on_parts), NoDrafts(), config, pace.clock)

    def run(self, seconds: float) -> None:
        """Send for so long, then stop at once: whoever waits then has waited to the end."""
        began = self._pace.clock.now()
        due = list(
            heapq.merge(*([(at, load.name, load) for at in load.arrivals(seconds, self._seed)] for load in self._loads))
        )
        self._began, sent = began, 0
        while (now := self._pace.clock.now()) - began < seconds:
            while sent < len(due) and due[sent][0] <= now - began:
                at, _, load = due[sent]
                sent += 1
                self._send(load, began + at)
            if self.core.has_work:
                report = self.core.step()
                self._pace.stepped()
                self._take_in(report, now)
            else:
                self._pace.idle(began + (due[sent][0] if sent < len(due) else seconds))
        for left in self._sent.values():
            if not left.is_admitted:
                self.figures[left.load.name].waits.append(now - left.at)

    def speed(self, requests: int) -> float:
        """Tokens a second, prompts' and answers', of so many requests that are there at once. Instead of ``run``."""
        self._began = began = self._pace.clock.now()
        for index in range(requests):
            self._send(self._loads[index % len(self._loads)], began)
        while self._sent:
            report, now = self.core.step(), self._pace.clock.now()
            self._pace.stepped()
            self._take_in(report, now)
        tokens = sum(figures.prompt + figures.drawn for figures in self.figures.values())
        return tokens / (self._pace.clock.now() - began)

    def _send(self, load: TenantLoad, at: float) -> None:
        key = next(self._numbers)
        prompt = tuple(self._tokens.randrange(3, self._vocab_size) for _ in range(load.prompt))
        stop = StopRules(max_tokens=load.output, ignore_eos=True)
        request = TokenRequest(f"r{key}", prompt, stop=stop, tenant=load.name, tier=load.tier)
        self._sent[key] = _Sent(load, at, key)
        self.figures[load.name].sent += 1
        is_answer = self._work is Work.DECODE
        self.core.handle(Reserve(key, request, load.prompt) if is_answer else Prefill(key, request, load.prompt))

    def _take_in(self, report: StepReport, stepped_at: float) -> None:
        now = self._pace.clock.now()
        for key in report.drawn.keys:
            self._count_drawn(self._sent[key], 1, now)
        for event in report.events:
            self._on_event(event, stepped_at, now)

    def _on_event(self, event: Event, stepped_at: float, now: float) -> None:
        match event:
            case Admitted(key, _, _):
                sent = self._sent[key]
                sent.is_admitted = True
                self.figures[sent.load.name].waits.append(stepped_at - sent.at)
            case Streamed(key, chunk):
                sent = self._sent[key]
                self._count_drawn(sent, len(chunk.token_ids), now)
                if chunk.finish is not None:
                    self._finish(sent)
            case First(key, _):
                self._count_drawn(self._sent[key], 1, now)
                self.core.handle(Release(key))
                self._finish(self._sent[key])
            case Failed(key, _):
                self.figures[self._sent.pop(key).load.name].refused += 1
            case _:
                pass

    def _finish(self, sent: _Sent) -> None:
        self.figures[sent.load.name].finished += 1
        del self._sent[sent.key]

    def _count_drawn(self, sent: _Sent, tokens: int, now: float) -> None:
        figures = self.figures[sent.load.name]
        if not sent.has_token:
            sent.has_token = True
            figures.ttfts.append(now - sent.at)
        if now - self._began >= self._judged_from:
            figures.drawn += tokens

    def _on_parts(self, parts: Sequence[Part]) -> None:
        is_judged = self._pace.clock.now() - self._began >= self._judged_from
        for part in parts:
            sent = self._sent.get(part.key)
            if sent is not None:
                end = min(part.end, sent.load.prompt)
                if is_judged:
                    self.figures[sent.load.name].prompt += max(0, end - max(part.start, sent.reached))
                sent.reached = max(sent.reached, end)


class _Counting:
    """A runner whose launches are looked at."""

    def __init__(self, runner: Runner, look: Callable[[Sequence[Part]], None]) -> None:
        self._runner = runner
        self._look = look
        self.card = runner.card
        self.total_blocks = runner.total_blocks
        self.steps_ahead = runner.steps_ahead
        self.collect = runner.collect
        self.while_waiting = runner.while_waiting
        self.has_filled = runner.has_filled
        self.forget = runner.forget
        self.read_blocks = runner.read_blocks
        self.write_blocks = runner.write_blocks
        self.close = runner.close

    @property
    def times(self) -> RunnerTimes:
        return self._runner.times

    @property
    def memory(self) -> PoolMemory | None:
        return self._runner.memory

    @property
    def copies(self) -> DeviceCopies | None:
        return self._runner.copies

    def launch(self, parts: Sequence[Part]) -> None:
        self._look(parts)
        self._runner.launch(parts)


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that at least ``share`` of them do not exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def jain(shares: Sequence[float]) -> float:
    """Fairness of Jain et al. 1984: 1 when all are equal, 1/n when one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)) if any(shares) else math.nan
