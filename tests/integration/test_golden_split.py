"""The goldens through the real path: gateway, planner, a prefill process, a decode process, bytes over gRPC."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.types import EngineStats, PrefillMode
from tests.goldens import DATA, TINY, Golden, read_goldens
from tests.launched import RunningStack, running_stack

ALWAYS_REMOTE = (
    "planner.local_prefill_max_tokens=0",
    "gateway.planner_budget_ms=10000",
    "engine.dtype=float32",
    "engine.threads=1",  # two engines at once
)
CONCURRENCY = 24
OVER_PROCESSES = ("llama-gqa-tied", "mixtral")
"""With those of test_real_engine_traffic the models that are least alike; the others when slow tests run."""


async def assert_exact_over_the_split_path(running: RunningStack, goldens: list[Golden]) -> None:
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(golden: Golden) -> int:
        async with slots:
            answer = await running.ask(golden.id, golden.by_ids(logprobs=5 if golden.logprobs else None))
        assert answer.error is None, (golden.id, answer.error)
        assert tuple(answer.token_ids) == golden.output, golden.id
        assert answer.finish is not None and answer.finish.value == golden.finish
        place, usage = answer.placement, answer.usage
        assert (place.prefill_mode, place.prefill_worker, place.decode_worker) == (
            PrefillMode.REMOTE,
            "prefill-0",
            "decode-0",
        )
        for ours, (token_id, logprob, top) in zip(answer.logprobs, golden.logprobs, strict=bool(golden.logprobs)):
            assert ours.token_id == token_id and abs(ours.logprob - logprob) <= 1e-3
            assert all(abs(p - dict(ours.top)[t]) <= 1e-3 for t, p in top if t in dict(ours.top))
        assert usage.prompt_tokens == len(golden.prompt)
        return place.kv_bytes

    before = (await running.settled())["decode-0"].stats
    shipped = sum(await asyncio.gather(*(one(golden) for golden in goldens)))
    await assert_decode_computed_no_prompt(running, goldens, shipped, before)
    await running.assert_idle()


async def assert_decode_computed_no_prompt(
    running: RunningStack, goldens: list[Golden], shipped: int, before: EngineStats
) -> None:
    """Decode's counters: no prompt token computed; bytes received are the uncached prompt tokens' KV, to the byte."""
    decode = (await running.settled())["decode-0"]
    assert decode.card is not None
    assert decode.stats.prompt_tokens_computed == before.prompt_tokens_computed
    per_token = decode.card.format.block_bytes // decode.card.format.block_size
    uncached = sum(len(golden.prompt) for golden in goldens) - (
        decode.stats.prompt_tokens_cached - before.prompt_tokens_cached
    )
    assert shipped == uncached * per_token


@pytest.mark.parametrize(
    "directory",
    [pytest.param(path, id=path.name, marks=() if path.name in OVER_PROCESSES else pytest.mark.slow) for path in TINY],
)
def test_tiny_goldens_are_exact_over_the_split_path(directory: Path) -> None:
    async def main() -> None:
        async with running_stack(str(directory), *ALWAYS_REMOTE, "engine.kv_cache_mb=32") as running:
            await assert_exact_over_the_split_path(running, read_goldens(directory / "golden.jsonl"))

    asyncio.run(main())


def test_smollm2_goldens_are_exact_over_the_split_path(smollm2_directory: Path) -> None:
    async def main() -> None:
        goldens = read_goldens(DATA / "smollm2-135m-instruct.jsonl")
        async with running_stack(str(smollm2_directory), *ALWAYS_REMOTE, "engine.kv_cache_mb=512") as running:
            await assert_exact_over_the_split_path(running, goldens)
            await assert_texts_and_messages_give_the_same(running, [g for g in goldens if g.messages or g.text][:6])

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_qwen_coder_goldens_are_exact_over_the_split_path(qwen_coder_directory: Path) -> None:
    async def main() -> None:
        goldens = read_goldens(DATA / "qwen2.5-coder-0.5b-instruct.jsonl")
        async with running_stack(str(qwen_coder_directory), *ALWAYS_REMOTE, "engine.kv_cache_mb=512") as running:
            await assert_exact_over_the_split_path(running, goldens)

    asyncio.run(main())


async def assert_texts_and_messages_give_the_same(running: RunningStack, goldens: list[Golden]) -> None:
    async def one(golden: Golden) -> None:
        request = replace(golden.by_ids(), prompt_token_ids=None, messages=golden.messages, text=golden.text)
        answer = await running.ask(golden.id, request)
        assert answer.error is None, (golden.id, answer.error)
        assert tuple(answer.token_ids) == golden.output and answer.text == golden.output_text
        assert answer.usage.prompt_tokens == len(golden.prompt)

    await asyncio.gather(*(one(golden) for golden in goldens))
