"""``python -m bench.failover``: a worker is killed, or stopped, under load. How long do its streams stand still?

Each trial starts a stack with two workers of each role, offers a Poisson load of streams through the gateway, and once
the load is steady sends one signal to one worker. Judged are the streams that the signal hit:

* of a decode worker, those that it had, and those that were sent to it until it was known to be gone: from the signal,
  or from their own start, to their next token;
* of a prefill worker, those that waited for their first token: from the signal to it. It includes the prompt's own
  computing, and requests that another prefill worker had: the client cannot tell them apart.

A request is lost when it ends with an error, or with fewer tokens than it asked for (EOS is ignored).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from baton.cli.launcher import Stack, StackPlan, launched
from baton.cli.models import resolve
from baton.cli.state_dir import StateDir
from baton.cli.terminal import say, table
from baton.client import Client, GenerateRequest
from baton.core.errors import BatonError
from baton.core.types import Role, StopRules
from bench.machine import hardware, versions
from bench.metrics import percentiles

WORKERS = 2  # of each role
REQUEST_SECONDS = 120.0
FAKE_SETTINGS = ("engine.fake_step_ms=20", "engine.max_step_tokens=64")  # a prompt of 400 tokens takes 0.14 s
ROLES = (Role.PREFILL, Role.DECODE)
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class FailoverPlan:
    """``steady`` seconds of load come before the signal, and ``after`` seconds follow it. Lengths are in tokens."""

    model: str
    rate: float
    trials: int
    prompt: int
    output: int
    steady: float
    after: float
    seed: int


@dataclass(slots=True)
class Stream:
    """One request as its client saw it. Times are of the event loop's clock."""

    asked: float
    times: list[float] = field(default_factory=list[float])  # of each chunk with tokens
    worker_at: list[str] = field(default_factory=list[str])  # the decode worker, by chunk
    tokens: int = 0
    migrations: int = 0
    error: str = ""

    def gap_after(self, moment: float, victim: str, role: Role) -> float | None:
        """Seconds to the next token from ``moment``, or from the start after it; None for a stream that was not hit."""
        after = next((time for time in self.times if time > moment), None)
        before = [worker for time, worker in zip(self.times, self.worker_at, strict=True) if time <= moment]
        if role is Role.DECODE:
            is_hit = before[-1] == victim if before else self.migrations > 0
        else:
            is_hit = not before and self.asked <= moment
        return after - max(moment, self.asked) if is_hit and after is not None else None


class Load:
    """Open-loop requests of a Poisson process, until ``stop``."""

    def __init__(self, client: Client, plan: FailoverPlan, draw: random.Random) -> None:
        self._client = client
        self._plan = plan
        self._draw = draw
        self.streams: list[Stream] = []

    async def run(self, seconds: float) -> None:
        """Offer requests for so long; returns when all have ended."""
        clock = asyncio.get_running_loop()
        end = clock.time() + seconds
        async with asyncio.TaskGroup() as group:
            while clock.time() < end:
                stream = Stream(clock.time())
                self.streams.append(stream)
                group.create_task(self._read(stream))
                await asyncio.sleep(self._draw.expovariate(self._plan.rate))

    async def _read(self, stream: Stream) -> None:
        prompt = tuple(self._draw.randrange(3, 500) for _ in range(self._plan.prompt))
        rules = StopRules(ignore_eos=True)
        request = GenerateRequest(
            prompt_token_ids=prompt, max_tokens=self._plan.output, stop=rules, timeout=REQUEST_SECONDS
        )
        worker = ""
        try:
            async with aclosing(self._client.stream(request)) as chunks:
                async for chunk in chunks:
                    worker = chunk.placement.decode_worker if chunk.placement else worker
                    stream.migrations = max(stream.migrations, chunk.migrations)
                    if chunk.token_ids:
                        stream.tokens += len(chunk.token_ids)
                        stream.times.append(asyncio.get_running_loop().time())
                        stream.worker_at.append(worker)
        except BatonError as error:
            stream.error = f"{error.reason}: {error.message}"


async def trial(plan: FailoverPlan, role: Role, number: signal.Signals, seed: int) -> tuple[list[Stream], list[float]]:
    """All streams of one trial, and the standstill in seconds of those that were hit."""
    flags = ("gateway.port=0", "planner.local_prefill_max_tokens=0", *(FAKE_SETTINGS if plan.model == "fake" else ()))
    with tempfile.TemporaryDirectory(prefix="baton-failover-") as directory:
        stack_plan = StackPlan(resolve(plan.model), prefill=WORKERS, decode=WORKERS, kvtransfer=0, flags=flags)
        async with (
            launched(stack_plan, StateDir(Path(directory))) as stack,
            Client(stack.record.gateway, stack.record.key) as client,
        ):
            load = Load(client, plan, random.Random(seed))
            running = asyncio.create_task(load.run(plan.steady + plan.after))
            await asyncio.sleep(plan.steady)
            victim, pid = _victim(stack, role)
            os.kill(pid, number)
            moment = asyncio.get_running_loop().time()
            await running
            if number is signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
    gaps = [stream.gap_after(moment, victim, role) for stream in load.streams]
    return load.streams, [gap for gap in gaps if gap is not None]


def _victim(stack: Stack, role: Role) -> tuple[str, int]:
    child = next(child for child in stack.children if child.role is role)
    return child.id, child.process.pid


async def case(plan: FailoverPlan, role: Role, name: str) -> dict[str, Any]:
    """All trials of one role and signal, as they stand in the result."""
    streams: list[Stream] = []
    gaps: list[float] = []
    for index in range(plan.trials):
        found, hit = await trial(plan, role, SIGNALS[name], plan.seed + index)
        streams += found
        gaps += hit
        say(f"{role.value} {name} {index + 1}/{plan.trials}: {len(found)} requests, {len(hit)} hit")
    lost = [stream for stream in streams if stream.error or stream.tokens != plan.output]
    return {
        "role": role.value,
        "signal": SIGNALS[name].name,
        "requests": len(streams),
        "hit": len(gaps),
        "migrated": sum(stream.migrations > 0 for stream in streams),
        "lost": len(lost),
        "errors": sorted({stream.error for stream in lost if stream.error}),
        "standstill_seconds": percentiles(gaps),
    }


def run(plan: FailoverPlan, roles: Sequence[Role], signals: Sequence[str], command: str) -> dict[str, Any]:
    """The whole result, ready to be written."""
    cases = [asyncio.run(case(plan, role, name)) for role in roles for name in signals]
    return {
        "command": command,
        "hardware": hardware(),
        "versions": versions(),
        "plan": asdict(plan),
        "cases": cases,
    }


def show(document: dict[str, Any]) -> str:
    rows = [
        (
            found["role"],
            found["signal"],
            str(found["requests"]),
            str(found["hit"]),
            str(found["lost"]),
            *(f"{found['standstill_seconds'][key]:.2f}" if found["hit"] else "-" for key in ("p50", "p99")),
        )
        for found in document["cases"]
    ]
    return table(("worker", "signal", "requests", "hit", "lost", "p50 s", "p99 s"), rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.failover", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="fake", help="as of `baton up`; fake computes nothing")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--trials", type=int, default=5, help="of each role and signal")
    parser.add_argument("--prompt", type=int, default=400, help="tokens in")
    parser.add_argument("--output", type=int, default=80, help="tokens out")
    parser.add_argument("--steady", type=float, default=4.0, help="seconds of load before the signal")
    parser.add_argument("--after", type=float, default=3.0, help="seconds of load after it")
    parser.add_argument("--roles", nargs="+", choices=[role.value for role in ROLES], default=ROLES)
    parser.add_argument("--signals", nargs="+", choices=list(SIGNALS), default=list(SIGNALS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="write the JSON here instead of printing it")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    plan = FailoverPlan(
        arguments.model,
        arguments.rate,
        arguments.trials,
        arguments.prompt,
        arguments.output,
        arguments.steady,
        arguments.after,
        arguments.seed,
    )
    roles = [Role(role) for role in arguments.roles]
    document = run(plan, roles, arguments.signals, shlex.join(["python", "-m", "bench.failover", *words]))
    text = json.dumps(document, indent=1)
    if arguments.save is None:
        print(text)
    else:
        arguments.save.write_text(text + "\n", encoding="utf-8")
    say(show(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
