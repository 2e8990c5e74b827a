"""kill -9 of real processes at work: the answer still comes, each token exactly once."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

from baton.cli.answers import Answer
from baton.core.streams import closing
from baton.core.types import GenerateChunk, GenerateRequest, PrefillMode, Sampling, StopRules
from baton.engine.config import EngineConfig
from tests.launched import RunningStack, prompt_request, running_stack
from tests.stack import PRINCIPAL, Stack

PROMPT = tuple(range(10, 410))  # 25 blocks; 50 prefill steps of 8 tokens
SLOW = ("engine.fake_step_ms=20", "engine.max_step_tokens=8", "planner.local_prefill_max_tokens=0")
STEADY = ("engine.fake_step_ms=20", "planner.local_prefill_max_tokens=0")
UNDISTURBED = EngineConfig(kv_blocks=500, block_size=16, max_step_tokens=512)


async def expected(request: GenerateRequest) -> Answer:
    """The answer of parts in this process that nothing happens to."""
    answer = Answer("undisturbed")
    async with (
        Stack(prefill=0, decode=1, engine=UNDISTURBED) as stack,
        closing(stack.gateway.generate(request, PRINCIPAL)) as chunks,
    ):
        async for chunk in chunks:
            answer.add(chunk, 0.0)
    assert answer.finish is not None
    return answer


def assert_same(answer: Answer, reference: Answer) -> None:
    assert answer.error is None, answer.error
    assert answer.token_ids == reference.token_ids
    assert answer.logprobs == reference.logprobs
    assert (answer.text, answer.finish) == (reference.text, reference.finish)
    assert answer.usage.completion_tokens == reference.usage.completion_tokens


async def kill_while_streaming(running: RunningStack, request: GenerateRequest, after_tokens: int) -> Answer:
    """Ask, and SIGKILL the decoding worker once ``after_tokens`` have arrived."""
    answer = Answer("disturbed")
    victim = ""
    async with aclosing(running.client.stream(request)) as chunks:
        async for chunk in chunks:
            answer.add(chunk, 0.0)
            if not victim and len(answer.token_ids) >= after_tokens:
                victim = answer.placement.decode_worker
                running.kill(victim)
    assert victim and answer.placement.decode_worker != victim and answer.migrations >= 1
    return answer


def test_answer_survives_the_death_of_its_prefill_worker_mid_prefill() -> None:
    async def main() -> None:
        request = prompt_request(PROMPT, 8)
        reference = await expected(request)
        async with running_stack("fake", *SLOW, prefill=2) as running:
            asking = asyncio.create_task(running.ask("disturbed", request))
            workers = await running.until(
                lambda found: any(r.stats.running for r in found.values() if r.id.startswith("prefill")),
                "a prefill worker computes",
            )
            victim = next(r.id for r in workers.values() if r.id.startswith("prefill") and r.stats.running)
            running.kill(victim)
            answer = await asking
            assert_same(answer, reference)
            assert answer.placement.prefill_mode is PrefillMode.REMOTE
            assert answer.placement.prefill_worker not in ("", victim)
            await running.until(lambda found: victim not in found, "the dead worker's lease ends")
            await running.assert_idle()

    asyncio.run(main())


def test_stream_survives_the_death_of_its_decode_worker() -> None:
    async def main() -> None:
        request = replace(prompt_request(PROMPT, 60), logprobs=2, stop=StopRules(ignore_eos=True))
        reference = await expected(request)
        async with running_stack("fake", *STEADY, decode=2) as running:
            assert_same(await kill_while_streaming(running, request, 10), reference)

    asyncio.run(main())


def test_stream_with_penalties_survives_the_death_of_the_only_decode_worker() -> None:
    async def main() -> None:
        sampling = Sampling(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3)
        request = replace(
            prompt_request(PROMPT, 60), sampling=sampling, seed=7, logprobs=0, stop=StopRules(ignore_eos=True)
        )
        reference = await expected(request)
        async with running_stack("fake", *STEADY) as running:
            answer = await kill_while_streaming(running, request, 10)
            assert_same(answer, reference)
            assert answer.placement.decode_worker == "prefill-0"

    asyncio.run(main())


def test_new_requests_are_served_without_a_planner() -> None:
    async def main() -> None:
        request = prompt_request(PROMPT, 8)
        async with running_stack("fake") as running:
            reference = await running.ask("with planner", request)
            running.kill("planner-0")
            for index in range(3):
                answer = await running.ask(f"without planner {index}", request)
                assert_same(answer, reference)
            await running.assert_idle()

    asyncio.run(main())


def test_chunks_of_a_migrated_stream_count_each_token_once() -> None:
    async def main() -> None:
        request = replace(prompt_request(PROMPT, 40), stop=StopRules(ignore_eos=True))
        async with running_stack("fake", *STEADY, decode=2) as running:
            chunks: list[GenerateChunk] = []
            killed = False
            async with aclosing(running.client.stream(request)) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    if not killed and sum(len(c.token_ids) for c in chunks) >= 5:
                        killed = True
                        placed = next(c.placement for c in chunks if c.placement)
                        running.kill(placed.decode_worker)
            assert sum(len(chunk.token_ids) for chunk in chunks) == 40
            assert [chunk.finish for chunk in chunks if chunk.finish] == [chunks[-1].finish]
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 40

    asyncio.run(main())
