"""What relaying every token costs the engine: a decode batch alone, then behind worker, planner and gateway.

``python -m bench.relay_tax --model random:llama-3-8b --device cuda`` runs as many streams at once both ways, each in
its own engine, and compares the engine's own steps, by its counters, while all streams decode. A JSON document comes
out. Where the counters know no device (on CPUs), the steps' wall time counts instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from baton.cli.launcher import StackPlan, launched
from baton.cli.models import ResolvedModel, resolve
from baton.cli.state_dir import StateDir
from baton.cli.subcommands import integer
from baton.cli.terminal import say
from baton.client import Client
from baton.core.clock import Clock, SystemClock
from baton.core.config import Section, Settings
from baton.core.errors import BatonError
from baton.core.types import EngineStats, Role
from baton.engine.client import spawn_engine
from baton.engine.config import EngineConfig, device_defaults
from bench.engine_bench import EngineBench
from bench.machine import hardware, versions
from bench.measure import Prompts, Shape, timed
from bench.prompts import RandomPrompts
from bench.shapes import Batch, Range

COMMAND = "python -m bench.relay_tax"
POLL_SECONDS = 0.05
WINDOW_SECONDS = 1.0  # of one look at the counters
PATIENCE_SECONDS = 300.0  # until all streams decode at once

Stats = Callable[[], Awaitable[EngineStats]]


@dataclass(frozen=True, slots=True)
class Load:
    """``streams`` requests at once, of so many tokens in and out."""

    streams: int
    prompt: int
    output: int


class Looks:
    """Milliseconds of the engine's steps, one figure a look, taken while all streams of a load decode."""

    def __init__(self, stats: Stats, load: Load, clock: Clock) -> None:
        self._stats = stats
        self._load = load
        self._clock = clock
        self._computed_before = 0
        self.step_ms: list[float] = []

    async def take(self) -> None:
        """Look on until the first stream has ended. Raises BatonError when they never all decode."""
        last = self._clock.now() + PATIENCE_SECONDS
        while not self._all_decode(await self._stats()):
            if self._clock.now() > last:
                raise BatonError(f"{self._load.streams} streams did not decode at once within {PATIENCE_SECONDS} s")
            await self._clock.sleep(POLL_SECONDS)
        before, since = await self._stats(), self._clock.now()
        while self._all_decode(before):
            await self._clock.sleep(WINDOW_SECONDS)
            after, now = await self._stats(), self._clock.now()
            if self._all_decode(after) and after.steps > before.steps:
                self.step_ms.append(_step_ms(before, after, now - since))
            before, since = after, now

    def _all_decode(self, stats: EngineStats) -> bool:
        computed = stats.prompt_tokens_computed - self._computed_before
        return stats.running == self._load.streams and computed >= self._load.streams * self._load.prompt

    async def note(self) -> None:
        """What has been computed up to now is not the load's."""
        self._computed_before = (await self._stats()).prompt_tokens_computed


def _step_ms(before: EngineStats, after: EngineStats, seconds: float) -> float:
    device = after.device_seconds + after.device_idle_seconds - before.device_seconds - before.device_idle_seconds
    return 1000 * (device or seconds) / (after.steps - before.steps)


async def observed(stats: Stats, load: Load, run: Callable[[], Awaitable[object]]) -> list[float]:
    """The steps' times while ``run`` offers the load."""
    looks = Looks(stats, load, SystemClock())
    await looks.note()
    running = asyncio.ensure_future(run())
    try:
        await looks.take()
        await running
    finally:
        running.cancel()
    return looks.step_ms


async def bare(model: ResolvedModel, flags: Sequence[str], load: Load) -> list[float]:
    """Of an engine whose front only reads."""
    settings = Settings.read(file=None, environ={}, flags=[*flags, f"engine.model={model.engine_model}"])
    config = settings.fill(Section("engine", EngineConfig, device_defaults))
    async with spawn_engine(config, on_progress=say) as engine:
        bench = EngineBench(engine, RandomPrompts(engine.card.vocab_size, 1), SystemClock())
        await bench.warm_up()
        shape = Batch("load", load.streams, Range(load.prompt, load.prompt), Range(load.output, load.output))

        async def stats() -> EngineStats:
            return engine.stats

        return await observed(stats, load, lambda: bench.measure(shape))


async def served(model: ResolvedModel, flags: Sequence[str], load: Load) -> list[float]:
    """Of a decode worker's engine, every token relayed through the gateway to a client."""
    async with _worker(model, flags) as (client, stats):
        vocabulary = (await client.model(model.name)).vocab_size
        prompts = Prompts(vocabulary, 2).draw(Shape("load", load.streams, load.prompt, load.output))
        return await observed(stats, load, lambda: timed(client, model.name, prompts, load.output))


@asynccontextmanager
async def _worker(model: ResolvedModel, flags: Sequence[str]) -> AsyncIterator[tuple[Client, Stats]]:
    """A stack whose only worker computes the prompts as well, and its engine's counters as it registers them."""
    settings = ("gateway.port=0", f"planner.local_prefill_max_tokens={1 << 20}", *flags)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        plan = StackPlan(model, prefill=0, decode=1, flags=settings)
        async with (
            launched(plan, StateDir(Path(directory))) as running,
            Client(running.record.gateway, running.record.key) as client,
        ):

            async def stats() -> EngineStats:
                [worker] = [found for found in await running.registry.processes() if found.role is Role.DECODE]
                return worker.stats

            yield client, stats


async def run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """Both ways, as one JSON document."""
    model, load = resolve(arguments.model), Load(arguments.streams, arguments.prompt, arguments.output)
    flags = [f"engine.device={arguments.device}", *arguments.flags]
    alone = await bare(model, flags, load)
    say(f"bare: {alone}")
    relayed = await served(model, flags, load)
    say(f"served: {relayed}")
    return {
        "command": command,
        "hardware": hardware(),
        "versions": versions(),
        "load": {"streams": load.streams, "prompt": load.prompt, "output": load.output},
        "bare_step_ms": [round(value, 4) for value in alone],
        "served_step_ms": [round(value, 4) for value in relayed],
        "tax": round(statistics.median(relayed) / statistics.median(alone) - 1, 5),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a known model, a directory or random:CONFIG")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument("--streams", type=integer(1, 4096), default=256)
    parser.add_argument("--prompt", type=integer(1, 1 << 20), default=1024)
    parser.add_argument("--output", type=integer(2, 1 << 20), default=512)
    parser.add_argument("--set", action="append", default=[], metavar="engine.KEY=VALUE", dest="flags")
    parser.add_argument("--save", type=Path, metavar="FILE", help="JSON file to write; standard output without it")
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(words)
    document = uvloop.run(run(arguments, shlex.join([*COMMAND.split(), *words])))
    text = json.dumps(document, indent=1)
    if arguments.save is None:
        print(text)
    else:
        arguments.save.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
