"""The parts of ``bench.two_gpus`` that ask what becomes of tokens: kills under load, and small models in float32."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from baton.cli.terminal import say
from baton.core.types import Role
from bench.failover import FailoverPlan, Load, Stream
from bench.metrics import percentiles
from bench.two_gpus_online import agreement
from bench.two_gpus_stack import RunningStack, Site, followed, running_stack

Note = Callable[[dict[str, Any]], None]
FLOAT32 = ("engine.dtype=float32", "engine.backend=torch", "planner.local_prefill_max_tokens=0")
SMALL_MODELS = ("random:tiny-llama", "random:tiny-mixtral", "random:tiny-qwen3-moe")
SMALL_LENGTHS, SMALL_OUTPUT = (1, 15, 16, 17, 100, 255, 256, 700), 48
OF_PREFILL = 2  # times the rate when a prefill worker is killed: only requests without a first token are hit
SMALL_POOL = "engine.kv_blocks=2048"


@dataclass(frozen=True, slots=True)
class KillPlan:
    """Load at ``rate`` for ``steady`` seconds before the signal and ``after`` seconds behind it, ``trials`` times; at
    twice the rate for prefill workers."""

    rate: float
    prompt: int
    output: int
    steady: float
    after: float
    trials: int
    seed: int


async def kills(site: Site, plan: KillPlan, note: Note) -> None:
    """SIGKILL of each role's only worker under load. Every trial has a stack of its own."""
    found: dict[str, Any] = {"plan": {name: getattr(plan, name) for name in plan.__slots__}, "roles": {}}
    for role in (Role.DECODE, Role.PREFILL):
        trials: list[dict[str, Any]] = []
        for index in range(plan.trials):
            trials.append(await _trial(site, plan, role, plan.seed + index))
            found["roles"][role.value] = _together(trials)
            note(found)
            say(f"kill {role.value}: {found['roles'][role.value]['standstill_seconds']}")


async def _trial(site: Site, plan: KillPlan, role: Role, seed: int) -> dict[str, Any]:
    rate = OF_PREFILL * plan.rate if role is Role.PREFILL else plan.rate
    load_plan = FailoverPlan(site.model, rate, 1, plan.prompt, plan.output, plan.steady, plan.after, seed)
    async with running_stack(site) as stack:
        load = Load(stack.client, load_plan, random.Random(seed))
        running = asyncio.create_task(load.run(plan.steady + plan.after))
        await asyncio.sleep(plan.steady)
        victim = next(child for child in stack.stack.children if child.role is role)
        os.kill(victim.process.pid, signal.SIGKILL)
        moment = asyncio.get_running_loop().time()
        await running
    gaps = [stream.gap_after(moment, victim.id, role) for stream in load.streams]
    lost = [stream for stream in load.streams if stream.error or stream.tokens != plan.output]
    return {
        "gaps": [gap for gap in gaps if gap is not None],
        "requests": len(load.streams),
        "restarts": sum(stream.migrations for stream in load.streams),
        "lost": len(lost),
        "errors": [stream.error.partition(":")[0] for stream in lost if stream.error],
        "longest_gap_after_seconds": _longest_gap(load.streams, moment),
    }


def _longest_gap(streams: Sequence[Stream], moment: float) -> float:
    """Between two tokens of one stream, the later of which came after the signal."""
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.times, stream.times[1:], strict=False)
        if later > moment
    ]
    return round(max(gaps, default=0.0), 3)


def _together(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    gaps = [gap for trial in trials for gap in trial["gaps"]]
    return {
        "trials": len(trials),
        "requests": sum(trial["requests"] for trial in trials),
        "hit": len(gaps),
        "restarts": sum(trial["restarts"] for trial in trials),
        "lost": sum(trial["lost"] for trial in trials),
        "errors": dict(Counter(error for trial in trials for error in trial["errors"])),
        "standstill_seconds": percentiles(gaps),
        "longest_gap_after_seconds": max(trial["longest_gap_after_seconds"] for trial in trials),
    }


async def small_tokens(site: Site, models: Sequence[str], note: Note) -> None:
    """Float32 by the reference: are the answers of a split the same as those of one worker? One after another."""
    found: dict[str, Any] = {}
    for model in models:
        small = replace(site, model=model, flags=(*FLOAT32, SMALL_POOL))
        answers: dict[str, list[tuple[int, ...]]] = {}
        began = time.monotonic()
        for name, prefill in (("split", 1), ("alone", 0)):
            async with running_stack(small, prefill=prefill, decode=1) as stack:
                answers[name] = await _small_answers(stack)
                sent = await stack.series("baton_kv_sent_bytes")
            if prefill:
                found[model] = {"kv_sent": sent}
        found[model] |= agreement(answers["split"], answers["alone"]) | {"seconds": round(time.monotonic() - began, 1)}
        say(f"{model}: {found[model]['equal']} of {found[model]['answers']} answers are equal")
        note(found)


async def _small_answers(stack: RunningStack) -> list[tuple[int, ...]]:
    random_ids = np.random.default_rng(30_001)
    found: list[tuple[int, ...]] = []
    for length in SMALL_LENGTHS:
        prompt = tuple(random_ids.integers(0, stack.info.vocab_size, length).tolist())
        found.append((await followed(stack, prompt, SMALL_OUTPUT))[1])
    return found
