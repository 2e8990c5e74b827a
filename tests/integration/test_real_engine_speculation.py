"""Real models answer with drafts as they do without, bit for bit in float32: what is drawn never depends on a draft."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import pytest

from baton.core.errors import ConfigError
from baton.core.types import Sampling
from baton.engine.client import spawn_engine
from baton.engine.drafter import Drafter, NgramDrafter
from baton.engine.load import build_runner
from baton.engine.model_drafter import ModelDrafter
from baton.engine.process import loaded
from baton.engine.runner import Runner
from tests.goldens import DATA
from tests.real_engines import ALL, VOCABULARY, AheadRunner, alone, prompt, real_config, request, together, varied
from tests.unit.engine.core_driver import CoreDriver
from tests.unit.engine.oracles import Oracle

BACKENDS = [*((name, "native") for name in ALL), ("llama-gqa-tied", "torch"), ("mistral-window", "torch")]
JOBS = [replace(varied(index, 20), logprobs=3) for index in range(10)]


def assert_answers_as_alone(name: str, backend: str, runner: Runner, drafter: Drafter, **changes: int) -> CoreDriver:
    """All JOBS at once on an engine with ``drafter``. Log-probabilities are compared bit for bit."""
    config = real_config(name, backend=backend, speculation="ngram", **changes)
    driver = CoreDriver(runner, config, drafter)
    keys = [driver.reserve(job) for job in JOBS]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    for job, key in zip(JOBS, keys, strict=True):
        found, expected = together(driver.outcomes[key].chunks), alone(name, job, backend=backend)
        assert found.content == expected.content, job.request_id
    driver.assert_idle()
    return driver


@pytest.mark.parametrize("mistaken", [0, 3])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_a_crowd_with_drafts_answers_as_each_does_alone(name: str, backend: str, ahead: bool, mistaken: int) -> None:
    runner = build_runner(real_config(name, backend=backend))
    known = [[*job.prompt, *alone(name, job, backend=backend).token_ids] for job in JOBS]
    oracle = Oracle(known, VOCABULARY, mistaken)
    driver = assert_answers_as_alone(name, backend, AheadRunner(runner) if ahead else runner, oracle, draft_tokens=5)
    assert driver.stats.draft_tokens_accepted > 10
    assert driver.stats.draft_tokens_accepted < driver.stats.draft_tokens_proposed or not mistaken


@pytest.mark.parametrize("name", ALL)
def test_lookup_and_a_smaller_model_change_no_token(name: str) -> None:
    runner = build_runner(real_config(name))
    assert_answers_as_alone(name, "native", runner, NgramDrafter())
    config = real_config(name, speculation="model", draft_model="tiny")
    for other in ("llama-gqa-tied", name):
        drafter = ModelDrafter(build_runner(real_config(other)), runner.card, config)
        driver = assert_answers_as_alone(name, "native", AheadRunner(runner), drafter)
        assert driver.stats.draft_tokens_proposed > 0


def test_a_model_that_drafts_for_itself_is_nearly_always_right() -> None:
    name = "llama-gqa-tied"
    config = real_config(name, speculation="model", draft_model=name, draft_tokens=4)
    drafter = ModelDrafter(build_runner(real_config(name)), build_runner(config).card, config)
    driver = CoreDriver(build_runner(config), config, drafter)
    wanted = request(prompt(40), 41)
    assert together(driver.answer(wanted).chunks).content == alone(name, wanted).content
    assert driver.stats.steps <= 1 + 1 + 40 // 5


def test_an_engine_process_loads_the_model_that_drafts() -> None:
    name = "llama-gqa-tied"
    config = real_config(name, speculation="model", draft_model=str(DATA / "tiny" / name), draft_kv_cache_mb=8)
    wanted = [request(prompt(9), 30), request(prompt(20), 30, sampling=Sampling(temperature=0.8, seed=5))]

    async def main() -> None:
        async with spawn_engine(config) as engine:
            for each in wanted:
                async with engine.reserve(each) as reservation:
                    chunks = [chunk async for chunk in reservation.decode(None)]
                assert together(chunks).token_ids == alone(name, each).token_ids
            assert engine.stats.draft_tokens_accepted > 20

    asyncio.run(main())


def test_an_engine_that_ends_closes_both_its_models_once() -> None:
    name = "llama-gqa-tied"
    config = real_config(name, speculation="model", draft_model=str(DATA / "tiny" / name), draft_kv_cache_mb=8)
    with loaded(config, lambda message: None) as (runner, drafter):
        assert runner.card.vocab_size == VOCABULARY
        assert drafter.expects(1, [1, 2, 3])
    gc.unfreeze()


def test_a_model_that_drafts_with_another_vocabulary_is_refused_when_loading() -> None:
    config = real_config("llama-gqa-tied", speculation="model", draft_model="random:smollm2-135m", dtype="float32")

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"engine\.draft_model: must have the vocabulary"):
            async with spawn_engine(config):
                pass

    asyncio.run(main())
