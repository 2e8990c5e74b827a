"""Many unlike requests at once through gateway, planner and worker processes: each gets what it would get alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from baton.cli.answers import Answer as Line
from baton.cli.ask import ask
from baton.cli.cases import Case
from baton.core.clock import SystemClock
from baton.core.types import GenerateRequest, PrefillMode, StopRules, TokenRequest
from baton.engine.config import EngineConfig
from baton.engine.load import build_runner
from gateway.fanout import choice_seed
from tests.answers import Answer
from tests.goldens import DATA, Golden, read_goldens
from tests.launched import RunningStack, running_stack
from tests.real_engines import SAMPLINGS, alone, prompt, together
from tests.unit.engine.core_driver import CoreDriver

CONCURRENCY = 16
LONGEST_ANSWER = 32
# Short prompts stay with decode, others go to prefill; blocks are few and none are reserved for growth.
MIXED = (
    "planner.local_prefill_max_tokens=48",
    "gateway.planner_budget_ms=10000",
    "engine.dtype=float32",
    "engine.threads=1",  # two engines at once
)
SCARCE = ("engine.growth_window=0", "engine.max_step_tokens=96", "engine.kv_blocks={blocks}")


@dataclass(frozen=True)
class Errand:
    """``leaves_after``: the client gives up when it has that many tokens; None: it reads to the end."""

    request: GenerateRequest
    leaves_after: int | None = None


def errand(index: int, ids: Sequence[int]) -> Errand:
    """The ``index``-th of a mix: every way to draw, to stop and to ask, in combinations that do not repeat soon."""
    max_tokens = 1 + 7 * index % LONGEST_ANSWER
    stop = StopRules(
        min_tokens=min(index % 4, max_tokens),
        stop_token_ids=tuple(range(12 * (index % 4))),
        ignore_eos=index % 5 != 0,
    )
    request = GenerateRequest(
        prompt_token_ids=tuple(ids),
        max_tokens=max_tokens,
        sampling=SAMPLINGS[index % len(SAMPLINGS)],
        seed=1000 + index,
        stop=stop,
        n=2 if index % 8 == 3 else 1,
        logprobs=(None, 0, 2)[index % 3],
        prompt_logprobs=1 if index % 11 == 5 else None,
        timeout=600,
    )
    return Errand(request, leaves_after=index % 5 if index % 6 == 4 else None)


def choices_of(request: GenerateRequest) -> list[TokenRequest]:
    """The requests of one choice each that the workers are to answer."""
    assert request.prompt_token_ids and request.seed is not None and request.max_tokens
    return [
        TokenRequest(
            "alone",
            request.prompt_token_ids,
            sampling=replace(request.sampling, seed=choice_seed(request.seed, index)),
            stop=replace(request.stop, max_tokens=request.max_tokens),
            logprobs=request.logprobs,
            prompt_logprobs=None if index else request.prompt_logprobs,
        )
        for index in range(request.n)
    ]


async def run_errand(running: RunningStack, name: str, wanted: Errand) -> list[Line]:
    if wanted.leaves_after is None:
        return await ask(running.client, Case(name, wanted.request), SystemClock())
    lines = [Line(name, index) for index in range(wanted.request.n)]
    async with aclosing(running.client.stream(wanted.request)) as chunks:
        async for chunk in chunks:
            lines[chunk.index].add(chunk, 0.0)
            if sum(len(line.token_ids) for line in lines) >= wanted.leaves_after:
                break
    return lines


async def run_all(running: RunningStack, errands: Sequence[Errand]) -> list[list[Line]]:
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(index: int, wanted: Errand) -> list[Line]:
        async with slots:
            return await run_errand(running, f"errand {index}", wanted)

    return await asyncio.gather(*(one(index, wanted) for index, wanted in enumerate(errands)))


def assert_exact(wanted: Errand, lines: list[Line], truth: Callable[[TokenRequest], Answer]) -> None:
    for line, choice in zip(lines, choices_of(wanted.request), strict=True):
        expected = truth(choice)
        assert line.error is None, (line.id, line.error)
        count = len(expected.token_ids) if wanted.leaves_after is None else len(line.token_ids)
        assert tuple(line.token_ids) == expected.token_ids[:count], line.id
        assert tuple(line.logprobs) == expected.logprobs[:count], line.id
        if wanted.leaves_after is None:
            assert tuple(line.prompt_logprobs) == expected.prompt_logprobs, line.id
            assert line.finish == expected.finish
            assert (line.usage.prompt_tokens, line.usage.completion_tokens) == (len(choice.prompt), count)


async def assert_all_exact(
    running: RunningStack, errands: Sequence[Errand], truth: Callable[[TokenRequest], Answer]
) -> None:
    answers = await run_all(running, errands)
    for wanted, lines in zip(errands, answers, strict=True):
        assert_exact(wanted, lines, truth)
    modes = {line.placement.prefill_mode for lines in answers for line in lines if line.finish}
    assert modes == {PrefillMode.LOCAL, PrefillMode.REMOTE}
    await running.assert_idle()


@pytest.mark.parametrize("name", ["mistral-window", "qwen3-moe"])
def test_forty_mixed_requests_are_exact_and_leave_nothing_held(name: str) -> None:
    """And eight more whose clients leave early. A fifth of the prompts begin like another one."""
    errands = [errand(i, prompt(1 + 61 * i % 290, salt=i % 39 if i % 5 else 7)) for i in range(48)]
    assert sum(each.leaves_after is None for each in errands) == 40

    async def main() -> None:
        flags = [flag.format(blocks=96) for flag in (*MIXED, *SCARCE)]
        async with running_stack(str(DATA / "tiny" / name), *flags) as running:
            await assert_all_exact(running, errands, lambda choice: alone(name, choice))

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_mixed_requests_on_smollm2_are_exact_and_leave_nothing_held(smollm2_directory: Path) -> None:
    goldens = read_goldens(DATA / "smollm2-135m-instruct.jsonl")
    errands = [errand(i, _cut(goldens[i % len(goldens)], 1 + 47 * i % 390)) for i in range(240)]
    assert sum(each.leaves_after is None for each in errands) == 200
    truths = _answers_alone(str(smollm2_directory), [c for each in errands for c in choices_of(each.request)])

    async def main() -> None:
        flags = [flag.format(blocks=200) for flag in (*MIXED, *SCARCE)]
        async with running_stack(str(smollm2_directory), *flags) as running:
            await assert_all_exact(running, errands, truths.__getitem__)

    asyncio.run(main())


def _cut(golden: Golden, length: int) -> tuple[int, ...]:
    return golden.prompt[: 1 + (length - 1) % len(golden.prompt)]


def _answers_alone(model: str, requests: Sequence[TokenRequest]) -> dict[TokenRequest, Answer]:
    """Each by an engine that has seen nothing else; the weights are loaded once."""
    config = EngineConfig(model, dtype="float32", kv_blocks=64, max_step_tokens=1024)
    runner = build_runner(config)
    return {each: together(CoreDriver(runner, config).answer(each).chunks) for each in requests}
