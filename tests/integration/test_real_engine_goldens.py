"""The reference's outputs from the bare engine: no service, no wire, only the channel to the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.core.types import StopRules, TokenRequest
from baton.engine.client import EngineClient, spawn_engine, threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.load import build_runner
from tests.contract.engine_driving import answer, assert_idle
from tests.goldens import DATA, SMOLLM2_FEW, TINY, Golden, read_goldens
from tests.real_engines import AheadRunner, real_config, request, together

SMOLLM2 = DATA / "smollm2-135m-instruct.jsonl"
TOLERANCE = 1e-3  # of log-probabilities: the reference sums in another order
MORE_THAN_COMPARED = 8  # likeliest ids, of which five are compared: nearly equal ones may change places at the end


async def assert_exact(engine: EngineClient, goldens: list[Golden]) -> None:
    """All at once, as many as the engine runs."""
    await asyncio.gather(*(_assert_one(engine, golden) for golden in goldens))
    await assert_idle(engine)


async def _assert_one(engine: EngineClient, golden: Golden) -> None:
    found = together(await answer(engine, _wanted(golden)))
    assert found.token_ids == golden.output, golden.id
    assert found.finish is not None and found.finish.value == golden.finish, golden.id
    for ours, (token_id, logprob, top) in zip(found.logprobs, golden.logprobs, strict=True):
        assert (ours.token_id, ours.logprob) == (token_id, pytest.approx(logprob, abs=TOLERANCE)), golden.id
        likeliest = dict(ours.top)
        assert [likeliest[each] for each, _ in top] == pytest.approx([p for _, p in top], abs=TOLERANCE), golden.id


def _wanted(golden: Golden) -> TokenRequest:
    return request(
        golden.prompt,
        stop=StopRules(max_tokens=golden.max_tokens),
        logprobs=MORE_THAN_COMPARED if golden.logprobs else None,
        request_id=golden.id,
    )


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("directory", TINY, ids=lambda path: path.name)
def test_tiny_goldens_are_exact_from_the_bare_engine(directory: Path, backend: str) -> None:
    config = real_config(directory.name, backend=backend)

    async def main() -> None:
        async with threaded_engine(build_runner(config), config) as engine:
            await assert_exact(engine, read_goldens(directory / "golden.jsonl"))

    asyncio.run(main())


@pytest.mark.parametrize("directory", TINY, ids=lambda path: path.name)
def test_tiny_goldens_are_exact_one_step_ahead(directory: Path) -> None:
    config = real_config(directory.name)

    async def main() -> None:
        async with threaded_engine(AheadRunner(build_runner(config)), config) as engine:
            await assert_exact(engine, read_goldens(directory / "golden.jsonl"))

    asyncio.run(main())


def test_smollm2_goldens_are_exact_from_the_bare_engine_process(smollm2_directory: Path) -> None:
    goldens = [golden for golden in read_goldens(SMOLLM2) if golden.id in SMOLLM2_FEW]
    assert len(goldens) == len(SMOLLM2_FEW)
    _check_process(smollm2_directory, goldens)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_smollm2_goldens_are_exact_from_the_bare_engine_process(smollm2_directory: Path) -> None:
    _check_process(smollm2_directory, read_goldens(SMOLLM2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_qwen_coder_goldens_are_exact_from_the_bare_engine_process(qwen_coder_directory: Path) -> None:
    _check_process(qwen_coder_directory, read_goldens(DATA / "qwen2.5-coder-0.5b-instruct.jsonl"))


def _check_process(directory: Path, goldens: list[Golden]) -> None:
    async def main() -> None:
        config = EngineConfig(str(directory), dtype="float32", kv_cache_mb=1024)
        async with spawn_engine(config) as engine:
            await assert_exact(engine, goldens)

    asyncio.run(main())
