"""``python -m bench.balance``: one prefill and one decode worker, or colocated ones, at a rate, without a GPU.

A simulation in discrete events. Engines, scheduler, TPOT target and the rules by which a prompt is computed here or
there are the real ones; what a step takes is told by a formula fitted to an H200 and Llama-3-8B in bfloat16
(bench/results/h200_llama_3_8b.json), and what hosts and hand-overs take by constants. It shows what the balance does to
TTFT and TPOT, and is no measurement of either.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from baton.core.clock import ManualClock
from baton.core.types import FirstToken, KvFormat, ModelCard, StopRules, TokenRequest, Usage
from baton.engine.config import CUDA_DEFAULTS, EngineConfig
from baton.engine.core import EngineCore
from baton.engine.drafter import NoDrafts
from baton.engine.messages import Admitted, Command, Decode, First, Prefill, Release, Reserve, StepReport, Streamed
from baton.engine.pacing import TILE_ROWS
from baton.engine.runner import Part, RunnerTimes, StepResult
from bench.arrivals import poisson
from bench.metrics import Objectives, Record, Timeline, Window, judge
from services.decode.balance import is_sooner_here
from services.planner.config import PlannerConfig

LLAMA_8B = KvFormat("bfloat16", block_size=16, layers=32, kv_heads=8, head_dim=128)
POOL_BLOCKS = 50_000  # 100 GiB
# Seconds. A step's products: reading the weights, and computing with them, once that takes longer; its attention: the
# KV that it reads, and pairs of tokens inside prompts; what a step with prompts takes more, and at least, kernel by
# kernel. Products take as long for any number of rows up to the next multiple of a tile's.
WEIGHTS, PER_ROW, PER_COMPUTED_ROW, CHUNKED = 3.9e-3, 1.07e-5, 2.09e-5, 1.6e-3
PER_KV_TOKEN, PER_PAIR, LEAST_WHOLE = 3.54e-8, 1.25e-9, 6.5e-3
TO_DECODE, TO_PREFILL, HAND_OVER, TO_CLIENT = 2.5e-3, 1.5e-3, 3e-3, 1e-3


def step_seconds(parts: Sequence[Part]) -> float:
    """What an H200 takes for them."""
    rows = sum(part.end - part.start for part in parts)
    products = WEIGHTS + PER_ROW * rows
    attention = 0.0
    chunked = False
    for part in parts:
        size = part.end - part.start
        if size == 1:
            attention += PER_KV_TOKEN * part.end
        else:
            chunked = True
            attention += PER_PAIR * size * (part.start + size / 2)
    if not chunked:
        return products + attention
    tiled = -(-rows // TILE_ROWS) * TILE_ROWS
    return max(max(products, CHUNKED + PER_COMPUTED_ROW * tiled) + attention, LEAST_WHOLE)


class TimedRunner:
    """Computes nothing, and lets the time pass that it would take. Satisfies ``Runner``."""

    memory = None
    copies = None
    steps_ahead = 0
    times = RunnerTimes()
    total_blocks = POOL_BLOCKS

    def __init__(self, card: ModelCard, clock: ManualClock) -> None:
        self.card = card
        self._clock = clock
        self._parts: Sequence[Part] = ()

    def while_waiting(self, look: Callable[[], None]) -> None: ...

    def has_filled(self) -> bool:
        return False

    def launch(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def collect(self) -> StepResult:
        self._clock.advance(step_seconds(self._parts))
        return StepResult([None if part.draw is None else 7 for part in self._parts], {})

    def forget(self, key: int) -> None: ...

    def read_blocks(self, blocks: Sequence[int]) -> bytes:
        raise NotImplementedError

    def write_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Case:
    """``colocated``: so many workers that do both, and no pools; 0: one prefill and one decode worker."""

    rate: float
    prompt: int
    output: int
    seconds: float = 60.0
    warm_up: float = 10.0
    seed: int = 1
    colocated: int = 0
    planner: PlannerConfig = PlannerConfig()
    tpot_target_ms: float = float(CUDA_DEFAULTS["tpot_target_ms"])
    max_step_tokens: int = 2048


class Events:
    """What happens when, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(when, self.now), next(self._numbers), act))

    def run(self) -> None:
        while self._queue:
            self.now, _, act = heapq.heappop(self._queue)
            act()


class Engine:
    """A core that is told commands between its steps, and whose reports arrive when a step has ended."""

    def __init__(self, events: Events, case: Case, on_report: Callable[[StepReport], None]) -> None:
        card = ModelCard("simulated", "llama", 16_384, 128_256, "", LLAMA_8B)
        config = EngineConfig(max_step_tokens=case.max_step_tokens, max_running=512, max_waiting=1024)
        config = replace(config, tpot_target_ms=case.tpot_target_ms)
        self._events = events
        self._clock = ManualClock()
        self._core = EngineCore(TimedRunner(card, self._clock), NoDrafts(), config, self._clock)
        self._inbox: list[Command] = []
        self._busy = False
        self._on_report = on_report
        self.stats = self._core.stats
        self.waiting: dict[int, int] = {}  # tokens of prefills that are not admitted, by key; all are of one tier
        self.busy_seconds = 0.0

    @property
    def backlog_tokens(self) -> int:
        return self.stats.backlog_tokens + sum(self.waiting.values())

    def send(self, command: Command) -> None:
        if isinstance(command, Prefill):
            self.waiting[command.key] = command.request.context_tokens
        self._inbox.append(command)
        if not self._busy:
            self._busy = True
            self._events.at(self._events.now, self._turn)

    def _turn(self) -> None:
        self._clock.advance(self._events.now - self._clock.now())
        for command in self._inbox:
            self._core.handle(command)
        self._inbox.clear()
        self._core.admit()
        self._report(self._core.report())
        if not self._core.run():
            self._busy = False
            return
        report = self._core.report()
        self.busy_seconds += self._clock.now() - self._events.now
        self._events.at(self._clock.now(), lambda: self._stepped(report))

    def _stepped(self, report: StepReport) -> None:
        self._report(report)
        self._turn()

    def _report(self, report: StepReport) -> None:
        self.stats = report.stats
        for event in report.events:
            if isinstance(event, Admitted):
                self.waiting.pop(event.key, None)
        self._on_report(report)


class Simulation:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.events = Events()
        self.local = 0
        self.records: dict[int, Record] = {}
        self._requests: dict[int, TokenRequest] = {}
        self._decodes = [
            Engine(self.events, case, lambda report, index=index: self._on_decode(index, report))
            for index in range(max(1, case.colocated))
        ]
        self._prefill = Engine(self.events, case, self._on_prefill)

    def run(self) -> None:
        end = self.case.warm_up + self.case.seconds
        for key, arrival in enumerate(poisson(self.case.rate, self.case.prompt, self.case.output, self.case.seed)):
            if arrival.at >= end:
                break
            self.events.at(arrival.at, lambda key=key, at=arrival.at: self._arrive(key, at))
        self.events.run()

    def _arrive(self, key: int, at: float) -> None:
        stop = StopRules(max_tokens=self.case.output, ignore_eos=True)
        request = TokenRequest(str(key), (key % 100_000 + 10, *range(self.case.prompt - 1)), stop=stop)
        self._requests[key] = request
        self.records[key] = Record(at, Timeline(at))
        limit = request.context_tokens if self.case.colocated else self.case.planner.local_prefill_max_tokens
        worker = self._decodes[key % len(self._decodes)]
        self.events.at(at + TO_DECODE, lambda: worker.send(Reserve(key, request, limit)))

    def _on_decode(self, index: int, report: StepReport) -> None:
        for event in report.events:
            if isinstance(event, Admitted) and not event.computing:
                self.events.at(self.events.now + TO_PREFILL, lambda key=event.key: self._place(key))
            elif isinstance(event, Streamed):
                self._deliver(event.key, ended=event.chunk.finish is not None)
        for key in report.drawn.keys:
            self._deliver(key, ended=False)

    def _place(self, key: int) -> None:
        """What prefill and decode worker make of the request between them."""
        request, engine, stats = self._requests[key], self._prefill, self._prefill.stats
        wait = self.case.planner.prefill_wait_ms / 1000 if self.case.planner.balance else None
        rate = stats.prompt_tokens_per_second
        if wait is not None and rate and engine.backlog_tokens / rate > wait:
            seconds = (engine.backlog_tokens + request.context_tokens) / rate
            if is_sooner_here(self._decodes[0].stats, request.tier, request.context_tokens, seconds):
                self.local += 1
                self._decodes[0].send(Decode(key, None))
                return
        engine.send(Prefill(key, request, request.context_tokens))

    def _on_prefill(self, report: StepReport) -> None:
        for event in report.events:
            if isinstance(event, First):
                self.events.at(self.events.now + HAND_OVER, lambda key=event.key: self._hand_over(key))

    def _hand_over(self, key: int) -> None:
        request = self._requests[key]
        self._prefill.send(Release(key))
        self._deliver(key, ended=False)
        first = FirstToken(7, Usage(len(request.prompt), 0, 1))
        self._decodes[0].send(Decode(key, first))

    def _deliver(self, key: int, *, ended: bool) -> None:
        record, now = self.records[key], self.events.now + TO_CLIENT
        record.timeline.add(now, 1)
        record.ended = now if ended else None

    def result(self, objectives: Objectives) -> dict[str, Any]:
        window = Window(self.case.warm_up, self.case.warm_up + self.case.seconds)
        found: dict[str, Any] = dict(judge(list(self.records.values()), window, objectives))
        offered = sum(window.holds(record.due) for record in self.records.values())
        total = self.events.now
        return {
            "offered": offered,
            "met_share": round(found["goodput_per_second"] * window.seconds / offered, 4),
            "local_share": round(self.local / len(self.records), 4),
            "ttft_ms": found["ttft_ms"],
            "tpot_ms": found["tpot_ms"],
            "prefill_busy": round(self._prefill.busy_seconds / total, 3),
        }


def simulate(case: Case, objectives: Objectives) -> dict[str, Any]:
    simulation = Simulation(case)
    simulation.run()
    return simulation.result(objectives)


LOOSE, STRICT = Objectives(500.0, 20.0), Objectives(300.0, 8.0)
RATES = {(2048, 256): (8.0, 12.0, 16.0, 20.0), (8192, 128): (2.0, 3.0, 4.0)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.balance", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--wait-ms", type=float, default=PlannerConfig().prefill_wait_ms)
    parser.add_argument("--tpot-target-ms", type=float, default=float(CUDA_DEFAULTS["tpot_target_ms"]))
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    kinds = {"balance": (0, True), "fixed split": (0, False), "two colocated": (2, True)}
    for (prompt, output), rates in RATES.items():
        for rate in rates:
            for name, (colocated, balance) in kinds.items():
                planner = PlannerConfig(balance=balance, prefill_wait_ms=arguments.wait_ms)
                case = Case(rate, prompt, output, arguments.seconds, seed=arguments.seed, colocated=colocated)
                case = replace(case, planner=planner, tpot_target_ms=arguments.tpot_target_ms)
                case = replace(case, max_step_tokens=arguments.step_tokens)
                found = {"loose": simulate(case, LOOSE), "strict_share": simulate(case, STRICT)["met_share"]}
                row = {"system": name, "in": prompt, "out": output, "rate": rate}
                print(json.dumps(row | found["loose"] | {"strict_share": found["strict_share"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
