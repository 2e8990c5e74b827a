"""The online part of ``bench.two_gpus``: rate after rate on one system, each written as soon as it is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.cli.terminal import say
from bench.two_gpus_stack import Clients, RunningStack, Shape, Site, followed, idle_row, rate_row, running_stack

# The most telling first: a run that is cut short has them.
SHAPES = (
    Shape(20, 2048, 256),
    Shape(12, 2048, 256),
    Shape(8, 2048, 256),
    Shape(3, 8192, 128),
    Shape(16, 2048, 256),
    Shape(4, 8192, 128),
    Shape(2, 8192, 128),
)
IDLE_REQUESTS, IDLE_OUTPUT, IDLE_SEED = 8, 24, 10_001
ANSWERS, ANSWER_SEED, ANSWER_LENGTHS = 12, 20_001, (1024, 64)
SERIES = ("baton_kv_", "baton_local_prefills", "baton_prefills_declined", "baton_prefill_attempts_failed")


@dataclass(frozen=True, slots=True)
class System:
    """Workers by role, and the settings that make it what it is."""

    name: str
    prefill: int
    decode: int
    flags: tuple[str, ...] = ()


SYSTEMS = {
    system.name: system
    for system in (
        System("split", 1, 1),
        System("colocated", 0, 2),
        System("unbalanced", 1, 1, ("planner.balance=false",)),
    )
}


@dataclass(frozen=True, slots=True)
class Course:
    """What every system goes through: ``seconds`` at each shape, after ``warm_up`` seconds of the same."""

    shapes: Sequence[Shape]
    seconds: float
    warm_up: float
    seed: int
    idle_prompts: tuple[int, ...] = (2048, 8192)


Note = Callable[[dict[str, Any]], None]


async def run_system(site: Site, system: System, course: Course, clients: Clients, note: Note) -> None:
    """``note`` is given all that is known so far, again and again."""
    found: dict[str, Any] = {"workers": {"prefill": system.prefill, "decode": system.decode}, "flags": system.flags}
    found |= {"idle": [], "rates": []}
    async with running_stack(site, *system.flags, prefill=system.prefill, decode=system.decode) as stack:
        found["model"] = stack.info.model
        for tokens in course.idle_prompts:
            found["idle"].append(await idle_row(stack, _prompts(stack, IDLE_SEED, IDLE_REQUESTS, tokens), IDLE_OUTPUT))
        note(found)
        found["answers"] = await _answers(stack)
        note(found)
        for shape in course.shapes:
            row = await rate_row(
                clients,
                stack,
                shape,
                warm_up=course.warm_up,
                seconds=course.seconds,
                seed=_seed(shape, course.seed),
            )
            found["rates"].append(row)
            say(f"{system.name}: {_line(row)}")
            note(found)
        found["series"] = await stack.series(*SERIES)
        note(found)


async def _answers(stack: RunningStack) -> list[str]:
    """Greedy answers to the same prompts on every system, one after another: how far do their tokens agree?"""
    length, output = ANSWER_LENGTHS
    length = min(length, stack.info.context_length - output)
    found = [(await followed(stack, p, output))[1] for p in _prompts(stack, ANSWER_SEED, ANSWERS, length)]
    return [",".join(map(str, ids)) for ids in found]


def read_answers(written: Sequence[str]) -> list[tuple[int, ...]]:
    """The token ids of each."""
    return [tuple(map(int, ids.split(","))) for ids in written]


def agreement(answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Whole answers that are equal, and the share of tokens before the first one that differs."""
    pairs = list(zip(answers, others, strict=True))
    leading = [next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(x)) for x, y in pairs]
    return {
        "answers": len(pairs),
        "equal": sum(tuple(x) == tuple(y) for x, y in pairs),
        "leading_tokens_equal": round(sum(leading) / sum(len(x) for x, _ in pairs), 4),
    }


def _prompts(stack: RunningStack, seed: int, count: int, tokens: int) -> list[tuple[int, ...]]:
    random = np.random.default_rng((seed, tokens))
    return [tuple(random.integers(0, stack.info.vocab_size, tokens).tolist()) for _ in range(count)]


def _seed(shape: Shape, seed: int) -> int:
    """The same for every system, and of its own for each shape: no rate meets the prefix cache of another one."""
    return (1_000_003 * seed + 1009 * shape.prompt + round(10 * shape.rate)) % 2**32


def _line(row: dict[str, Any]) -> str:
    ttft, tpot = row["ttft_ms"] or {}, row["tpot_ms"] or {}
    return (
        f"{row['prompt']}/{row['output']} at {row['rate']:g}: "
        f"loose {row['loose_share']}, strict {row['strict_share']}; "
        f"TTFT p50 {ttft.get('p50')} p99 {ttft.get('p99')} ms, TPOT p50 {tpot.get('p50')} p99 {tpot.get('p99')} ms, "
        f"errors {row['errors']}"
    )
