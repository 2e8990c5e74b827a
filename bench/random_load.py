"""``python -m bench.random_load``: random requests on one engine whose KV pool is too small for them.

Requests of random lengths, draws and priorities, half of them with shared prefixes, arrive at random times; clients
leave at random moments, and some come back with the tokens they have. During the load the pool must add up; finished
answers must agree with themselves, with the engine's own count and, for a sample, with a replay alone. Afterwards no
block may be held, and memory must not have grown. Exit status 1 with the list of what did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import uvloop

from baton.cli.subcommands import integer
from baton.cli.terminal import say
from baton.core.api import EngineApi
from baton.core.clock import Clock, SystemClock
from baton.core.config import Setting, Settings
from baton.core.errors import ConfigError
from baton.core.types import TokenRequest
from baton.engine.client import spawn_engine
from baton.engine.config import EngineConfig
from bench.load_mix import LoadMix
from bench.load_replay import Replay, is_greedy, replay_exactly, replay_nearly
from bench.load_run import Account, LoadRun
from bench.machine import hardware, versions
from bench.memory_watch import MemoryWatch
from bench.offline import ENGINE, engine_flags
from bench.random_model import FAKE

COMMAND = "python -m bench.random_load"
CHECK_SECONDS = 0.02
SAMPLE_SECONDS = 1.0
SAY_SECONDS = 30.0
DRAIN_SECONDS = 180.0  # that requests get to end after the load
IDLE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Seconds:
    """A load of so many seconds."""

    seconds: int

    @property
    def at_most(self) -> float:
        """Seconds until the first client must have ended, or none can."""
        return self.seconds + DRAIN_SECONDS

    def start(self, clock: Clock) -> Callable[[], bool]:
        """Says whether another request may begin."""
        end = clock.now() + self.seconds
        return lambda: clock.now() < end


@dataclass(frozen=True, slots=True)
class Requests:
    """A load of so many requests."""

    requests: int

    @property
    def at_most(self) -> float:
        return DRAIN_SECONDS + self.requests

    def start(self, clock: Clock) -> Callable[[], bool]:
        numbers = count()
        return lambda: next(numbers) < self.requests


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """``pause``: a client's, in seconds, mean. ``replays``: how many finished answers are compared alone. ``gpu``: the
    one whose memory is watched, by the driver's number."""

    config: EngineConfig
    extent: Seconds | Requests
    clients: int
    pause: float
    replays: int
    seed: int
    gpu: int = 0


def is_exact(config: EngineConfig) -> bool:
    """Whether answers do not depend on what else is computed."""
    return config.model == FAKE or (config.device == "cpu" and config.dtype == "float32")


async def load(engine: EngineApi, plan: LoadPlan, clock: Clock) -> dict[str, Any]:
    """Run the load; the result has ``faults``, empty when all held, and what the load was made of."""
    exact = is_exact(plan.config)
    account = Account(plan.replays, plan.seed, _anything if exact else is_greedy)
    watch = MemoryWatch(plan.config.device, plan.gpu)
    run = LoadRun(engine, LoadMix(engine.card, _longest(engine), plan.seed, plan.pause), clock, account)
    started = clock.now()
    async with _watched(run, watch, account, clock):
        await _drive(plan, run, account, clock)
    seconds = clock.now() - started
    stats = engine.stats
    await _check_idle(engine, account, clock)
    replay = replay_exactly if exact else replay_nearly
    replays = [await replay(engine, record) for record in account.kept]
    await _check_idle(engine, account, clock)
    account.fault(*(fault for each in replays for fault in each.faults), *watch.faults())
    return {
        "seconds": round(seconds, 1),
        "requests": dict(sorted(account.outcomes.items())),
        "tokens": account.tokens,
        "engine": dataclasses.asdict(stats),
        "replays": _summary(replays, exact),
        "memory_mib": watch.figures(),
        "fault_count": account.fault_count,
        "faults": account.faults,
    }


def _anything(request: TokenRequest) -> bool:
    return True


def _longest(engine: EngineApi) -> int:
    """Tokens of a request at most, which two fill the pool with."""
    pool = engine.stats.total_blocks * engine.card.format.block_size
    return max(2, min(engine.card.context_length - 1, pool // 2))


async def _drive(plan: LoadPlan, run: LoadRun, account: Account, clock: Clock) -> None:
    goes_on = plan.extent.start(clock)
    clients = [asyncio.create_task(run.client(goes_on)) for _ in range(plan.clients)]
    try:
        ended, _ = await asyncio.wait(clients, timeout=plan.extent.at_most, return_when=asyncio.FIRST_COMPLETED)
        has_failed = any(client.exception() for client in ended)
        _, late = await asyncio.wait(clients, timeout=0 if has_failed else DRAIN_SECONDS)
        if late and not has_failed:
            account.fault(f"{len(late)} requests did not end within {DRAIN_SECONDS:g} s after the load")
    finally:
        for client in clients:
            client.cancel()
        ends = await asyncio.gather(*clients, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


@asynccontextmanager
async def _watched(run: LoadRun, watch: MemoryWatch, account: Account, clock: Clock) -> AsyncIterator[None]:
    """Checks the blocks, samples memory and tells how far it is, until the load has ended."""
    tasks = [
        asyncio.create_task(_check_blocks(run, clock)),
        asyncio.create_task(_sample(watch, clock)),
        asyncio.create_task(_tell(account, clock)),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


async def _check_blocks(run: LoadRun, clock: Clock) -> None:
    while True:
        run.check_blocks()
        await clock.sleep(CHECK_SECONDS)


async def _sample(watch: MemoryWatch, clock: Clock) -> None:
    while True:
        await watch.sample()
        await clock.sleep(SAMPLE_SECONDS)


async def _tell(account: Account, clock: Clock) -> None:
    while True:
        await clock.sleep(SAY_SECONDS)
        say(f"{sum(account.outcomes.values())} requests, {account.tokens} tokens, {account.fault_count} faults")


async def _check_idle(engine: EngineApi, account: Account, clock: Clock) -> None:
    """With no request left nothing is held, queued or running, and every block is accounted for."""
    end = clock.now() + IDLE_SECONDS
    while _busy(engine) and clock.now() < end:
        await clock.sleep(CHECK_SECONDS)
    stats = engine.stats
    if _busy(engine) or stats.free_blocks + stats.cached_blocks != stats.total_blocks:
        account.fault(f"after the load, with no request left: {stats}")


def _busy(engine: EngineApi) -> bool:
    return bool(engine.stats.held_blocks or engine.stats.running or engine.stats.waiting)


def _summary(replays: Sequence[Replay], exact: bool) -> dict[str, object]:
    tokens = sum(each.tokens for each in replays)
    return {
        "must_be_equal": exact,
        "answers": len(replays),
        "equal_answers": sum(each.equal_prefix == each.tokens for each in replays),
        "tokens": tokens,
        "tokens_in_equal_prefixes": sum(each.equal_prefix for each in replays),
        "most_nats_lost": round(max((each.lost for each in replays), default=0.0), 3),
    }


# --- command line -----------------------------------------------------------------------------------------------------


def load_config(model: str, device: str, flags: Sequence[str], clients: int) -> EngineConfig:
    """The engine's settings: without ``--set``, too few blocks, places and room in a step for all clients."""
    options = [Setting("engine", "model", model, "--model"), Setting("engine", "device", device, "--device")]
    settings = Settings([*options, *engine_flags(flags)])
    scarce = {
        "kv_blocks": 8 * clients,
        "growth_window": 16,
        "max_running": clients,
        "max_waiting": max(2, clients * 2 // 3),
        "max_step_tokens": 1024 if device == "cuda" else 256,
    }
    unset = {key: value for key, value in scarce.items() if settings.last("engine", key) is None}
    return dataclasses.replace(settings.fill(ENGINE), **unset)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a model directory, random:CONFIG or fake")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--seconds", type=integer(1, 86_400), default=240)
    extent.add_argument("--requests", type=integer(1, 10_000_000))
    parser.add_argument("--clients", type=integer(1, 10_000), default=64, help="at once")
    parser.add_argument("--pause-ms", type=integer(1, 60_000), default=50, help="of a client, mean")
    parser.add_argument("--replays", type=integer(0, 10_000), default=40)
    parser.add_argument("--seed", type=integer(0, 2**32 - 1), default=1)
    parser.add_argument("--gpu", type=integer(0, 63), default=0, help="whose memory is watched, as nvidia-smi counts")
    parser.add_argument("--set", action="append", default=[], metavar="engine.KEY=VALUE", dest="flags")
    parser.add_argument("--output", type=Path, help="JSON file to write; standard output without it")
    return parser


def plan_of(arguments: argparse.Namespace) -> LoadPlan:
    return LoadPlan(
        config=load_config(arguments.model, arguments.device, arguments.flags, arguments.clients),
        extent=Seconds(arguments.seconds) if arguments.requests is None else Requests(arguments.requests),
        clients=arguments.clients,
        pause=arguments.pause_ms / 1000,
        replays=arguments.replays,
        seed=arguments.seed,
        gpu=arguments.gpu,
    )


async def run(plan: LoadPlan) -> dict[str, Any]:
    async with spawn_engine(plan.config, on_progress=say) as engine:
        result = await load(engine, plan, SystemClock())
    if not result["engine"]["preemptions"]:
        result["faults"].append("no request was preempted: the load needs fewer engine.kv_blocks or more clients")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(words)
    output: Path | None = arguments.output
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: there is no such directory")
    plan = plan_of(arguments)
    head = {
        "command": shlex.join([*COMMAND.split(), *words]),
        "hardware": hardware(),
        "versions": versions(),
        "config": dataclasses.asdict(plan.config),
    }
    document: dict[str, Any] = head | uvloop.run(run(plan))
    text = json.dumps(document, indent=1)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")
    for fault in document["faults"]:
        say(fault)
    say(f"{len(document['faults'])} faults, {document['engine']['preemptions']} preemptions")
    return 1 if document["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
