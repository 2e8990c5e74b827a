"""Signals under the default model, float32: text, logprobs and stop strings come out as if nothing had happened."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.cli.answers import Answer
from baton.core.types import ChatMessage, GenerateRequest, PrefillMode, Sampling, StopRules
from tests.launched import GENEROUS_SECONDS, RunningStack, running_stack

pytestmark = pytest.mark.slow

QUESTION = "Write a long story about a lighthouse keeper who counts birds."
FLAGS = (
    "engine.dtype=float32",
    "engine.kv_cache_mb=512",
    "planner.local_prefill_max_tokens=0",
    "gateway.planner_budget_ms=10000",
)
PENALISED = Sampling(temperature=0.7, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1)


def story(**changes: object) -> GenerateRequest:
    request = GenerateRequest(
        messages=(ChatMessage("user", QUESTION),), max_tokens=64, logprobs=3, timeout=GENEROUS_SECONDS, seed=11
    )
    return replace(request, **changes)


@asynccontextmanager
async def smollm2(directory: Path, **workers: int) -> AsyncIterator[RunningStack]:
    async with running_stack(str(directory), *FLAGS, **workers) as running:
        yield running


def assert_same(answer: Answer, reference: Answer) -> None:
    assert answer.error is None and reference.error is None, (answer.error, reference.error)
    assert answer.token_ids == reference.token_ids
    assert answer.text == reference.text
    assert answer.logprobs == reference.logprobs
    assert answer.finish is reference.finish
    assert answer.usage.completion_tokens == reference.usage.completion_tokens == len(answer.token_ids)


async def kill_decoder(
    running: RunningStack, request: GenerateRequest, after_tokens: int, number: signal.Signals = signal.SIGKILL
) -> Answer:
    answer, killed = Answer("disturbed"), False
    async with aclosing(running.client.stream(request)) as chunks:
        async for chunk in chunks:
            answer.add(chunk, 0.0)
            if not killed and len(answer.token_ids) >= after_tokens:
                killed = True
                running.kill(answer.placement.decode_worker, number)
    assert answer.migrations == (number is not signal.SIGTERM)  # told to end, it first ends what runs
    return answer


def requests(stop: str) -> list[GenerateRequest]:
    """Greedy, penalised and sampled, and with a stop string."""
    return [story(), story(sampling=PENALISED), story(sampling=PENALISED, stop_strings=(stop,))]


async def references(directory: Path) -> tuple[list[GenerateRequest], list[Answer]]:
    async with smollm2(directory) as running:
        whole = await running.ask("whole", story(sampling=PENALISED))
        stop = whole.text[len(whole.text) * 3 // 4 :][:6]
        asked = requests(stop)
        answers = [await running.ask(f"reference {index}", request) for index, request in enumerate(asked)]
    assert len(answers[2].token_ids) < len(answers[1].token_ids) and stop not in answers[2].text
    return asked, answers


@pytest.mark.parametrize("workers", [{"decode": 2}, {"decode": 1}], ids=["two decode workers", "the only one"])
def test_streams_survive_the_death_of_their_decode_worker(smollm2_directory: Path, workers: dict[str, int]) -> None:
    async def main() -> None:
        asked, expected = await references(smollm2_directory)
        for request, reference in zip(asked, expected, strict=True):
            async with smollm2(smollm2_directory, **workers) as running:
                assert_same(await kill_decoder(running, request, 20), reference)

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTERM])
def test_stream_survives_a_decode_worker_that_is_stopped_or_told_to_end(
    smollm2_directory: Path, number: signal.Signals
) -> None:
    async def main() -> None:
        request = story(sampling=PENALISED)
        async with smollm2(smollm2_directory, decode=2) as running:
            reference = await running.ask("reference", request)
            assert_same(await kill_decoder(running, request, 20, number), reference)
            for child in running.stack.children:  # so that a stopped one can end in order
                if child.process.poll() is None:
                    child.process.send_signal(signal.SIGCONT)

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_answer_survives_the_death_of_its_prefill_worker_mid_prefill(
    smollm2_directory: Path, number: signal.Signals
) -> None:
    async def main() -> None:
        ids = tuple(range(1000, 2400))
        request = GenerateRequest(
            prompt_token_ids=ids, max_tokens=16, timeout=GENEROUS_SECONDS, stop=StopRules(ignore_eos=True)
        )
        async with smollm2(smollm2_directory) as running:
            reference = await running.ask("reference", request)
        async with smollm2(smollm2_directory, prefill=2) as running:
            asking = asyncio.create_task(running.ask("disturbed", request))
            workers = await running.until(
                lambda found: any(r.stats.running for r in found.values() if r.id.startswith("prefill")),
                "a prefill worker computes",
            )
            victim = next(r.id for r in workers.values() if r.id.startswith("prefill") and r.stats.running)
            running.kill(victim, number)
            answer = await asking
            if number is signal.SIGSTOP:
                running.kill(victim, signal.SIGCONT)  # so that it can end in order
            assert_same(answer, reference)
            assert answer.placement.prefill_mode is PrefillMode.REMOTE
            if number is not signal.SIGTERM:  # which may end what runs first
                assert answer.placement.prefill_worker not in ("", victim)

    asyncio.run(main())
