"""A real model's answer does not depend on what else the engine does, has done, or is short of.

Driven step by step, so that every example is the same each time. Log-probabilities are compared bit for bit; with as
many of them as the vocabulary has ids they are the logits themselves, less their normalizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.types import Sampling, StopRules, TokenRequest
from baton.engine.config import EngineConfig
from baton.engine.load import build_runner
from baton.engine.runner import Part, Runner
from tests.real_engines import (
    ALL,
    SAMPLINGS,
    UNLIKE,
    VOCABULARY,
    AheadRunner,
    alone,
    gated,
    prompt,
    real_config,
    real_driver,
    request,
    together,
    varied,
)
from tests.unit.engine.core_driver import STEPS, CoreDriver

LENGTH = 70  # of most prompts: longer than the sliding window of 48, four blocks of 16 and a part
SAMPLED = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=7)
BACKENDS = [*((name, "native") for name in ALL), ("llama-gqa-tied", "torch"), ("mistral-window", "torch")]


def assert_nothing_is_held(driver: CoreDriver) -> None:
    driver.assert_idle()
    assert driver.stats.free_blocks + driver.stats.cached_blocks == driver.stats.total_blocks


# --- prefix hits and chunks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_every_prefix_hit_length_gives_the_same_tokens_and_logprobs(name: str, backend: str, block_size: int) -> None:
    wanted = request(prompt(LENGTH), 4, sampling=SAMPLED, logprobs=3)
    expected = alone(name, wanted, backend=backend, block_size=block_size)
    driver = real_driver(real_config(name, backend=backend, block_size=block_size, kv_blocks=64))
    for hit in range(LENGTH + 1) if _is_quick(name, backend) else _beside_boundaries(16):
        salt = str(hit).encode()
        other = [(token + 1) % VOCABULARY for token in wanted.prompt[hit:]]
        driver.answer(request((*wanted.prompt[:hit], *other, 1), 1, salt=salt))
        outcome = driver.answer(replace(wanted, salt=salt))
        assert outcome.cached_tokens == min(hit, LENGTH - 1) // block_size * block_size
        assert together(outcome.chunks).content == expected.content, hit
    assert_nothing_is_held(driver)


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_every_chunk_size_gives_the_same_logprobs_of_prompt_and_answer(name: str, backend: str) -> None:
    wanted = request(prompt(LENGTH), 4, sampling=SAMPLED, logprobs=2, prompt_logprobs=2)
    expected = alone(name, wanted, backend=backend)
    assert len(expected.prompt_logprobs) == LENGTH
    runner = build_runner(config := real_config(name, backend=backend))
    for size in range(1, LENGTH + 2) if _is_quick(name, backend) else _beside_boundaries(16)[1:]:
        driver = CoreDriver(runner, replace(config, max_step_tokens=size))
        assert together(driver.answer(wanted).chunks).content == expected.content, size
        assert_nothing_is_held(driver)


def _is_quick(name: str, backend: str) -> bool:
    """Whether to take every length, not only those where something changes."""
    return backend == "native" and name in UNLIKE


def _beside_boundaries(step: int) -> list[int]:
    """0, LENGTH, and every multiple of ``step`` with its neighbours."""
    beside = {at + offset for at in range(0, LENGTH + 1, step) for offset in (-1, 0, 1)}
    return sorted(at for at in beside | {LENGTH} if 0 <= at <= LENGTH)


# --- company ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNLIKE)
def test_every_logit_is_the_same_alone_and_in_batches_of_1_to_64(name: str) -> None:
    """One more request joins at each step and all go on to the end, so that each is decoded in growing batches."""
    sizes: set[int] = set()

    def note_size(parts: Sequence[Part]) -> None:
        sizes.add(len(parts))

    config = real_config(name, kv_blocks=700, max_running=64)
    driver = CoreDriver(gated(config, note_size), config)
    jobs = [_joining(index) for index in range(64)]
    keys: list[int] = []
    for job in jobs:
        keys.append(key := driver.reserve(job))
        driver.decode_when_admitted(key)
        driver.step()
    driver.finish(*keys)
    assert sizes >= set(range(1, 65))
    for job, key in zip(jobs, keys, strict=True):
        assert together(driver.outcomes[key].chunks).content == alone(name, job).content, job.request_id
    assert_nothing_is_held(driver)


def _joining(index: int) -> TokenRequest:
    sampling = SAMPLINGS[index % len(SAMPLINGS)]
    logprobs = VOCABULARY if index % 16 == 0 else 1
    return request(prompt(1 + 23 * index % 97, index), 68 - index, sampling=sampling, logprobs=logprobs)


@pytest.mark.parametrize(("name", "backend"), [*((name, "native") for name in UNLIKE), ("mistral-window", "torch")])
def test_a_crowd_short_of_blocks_is_preempted_and_each_answers_as_if_alone(name: str, backend: str) -> None:
    config = real_config(name, backend=backend, block_size=4, kv_blocks=32, growth_window=0, max_step_tokens=24)
    driver = real_driver(config)
    jobs = [varied(index, 24, prompt=prompt(3 + 5 * index, index), priority=index % 2) for index in range(10)]
    jobs = [replace(job, stop=StopRules(24, ignore_eos=True), logprobs=1) for job in jobs]
    keys = [driver.reserve(job) for job in jobs]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    assert driver.stats.preemptions >= 3
    for job, key in zip(jobs, keys, strict=True):
        assert together(driver.outcomes[key].chunks).content == alone(name, job, backend=backend).content
    assert_nothing_is_held(driver)


@dataclass(frozen=True)
class Job:
    """``leaves``: at that step its client gives up; None: it stays to the end."""

    request: TokenRequest
    arrives: int
    leaves: int | None


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    family, length, index = draw(st.integers(0, 2)), draw(st.integers(1, 80)), draw(st.integers(0, 20))
    tail = prompt(draw(st.integers(0, 5)), draw(st.integers(50, 99)))
    wanted = varied(
        index,
        draw(st.integers(4, 24)),
        prompt=prompt(length, family) + tail,
        priority=draw(st.integers(0, 2)),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
    )
    return Job(wanted, draw(st.integers(0, 20)), draw(st.sampled_from([None, None, None, 1, 5, 20])))


def in_step(config: EngineConfig) -> Runner:
    return build_runner(config)


def one_step_ahead(config: EngineConfig) -> Runner:
    return AheadRunner(build_runner(config))


@pytest.mark.parametrize(
    ("name", "runner"), [*((name, in_step) for name in UNLIKE), *((name, one_step_ahead) for name in UNLIKE[:2])]
)
@settings(max_examples=15, deadline=None)
@given(
    mix=st.lists(jobs(), min_size=2, max_size=10),
    block_size=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 12),
    limits=st.fixed_dictionaries(
        {
            "growth_window": st.sampled_from([0, 3, 256]),
            "max_step_tokens": st.integers(1, 90),
            "max_running": st.integers(1, 12),
        }
    ),
)
def test_any_mix_under_any_pressure_gives_what_each_gets_alone(
    name: str,
    runner: Callable[[EngineConfig], Runner],
    mix: list[Job],
    block_size: int,
    spare: int,
    limits: dict[str, int],
) -> None:
    """Shared prefixes, arrivals at any step, clients that leave, pools that hardly hold one of the requests."""
    longest = max(len(job.request.prompt) + job.request.stop.max_tokens for job in mix)
    config = real_config(name, block_size=block_size, kv_blocks=-(-longest // block_size) + spare, **limits)
    driver = CoreDriver(runner(config), config)
    for job, key in zip(mix, run_mix(driver, mix), strict=True):
        outcome, expected = driver.outcomes[key], alone(name, job.request, block_size=block_size)
        assert outcome.error is None
        told = together(outcome.chunks)
        if outcome.is_over:
            assert told.content == expected.content
        else:
            assert job.leaves is not None
            count = len(told.token_ids)
            assert (told.token_ids, told.logprobs) == (expected.token_ids[:count], expected.logprobs[:count])
    assert_nothing_is_held(driver)


def run_mix(driver: CoreDriver, mix: list[Job]) -> list[int]:
    """Play all arrivals and departures until nobody is left; returns the keys in the order of ``mix``."""
    keys: dict[int, int] = {}
    gone: set[int] = set()
    for now in range(STEPS):
        for index, job in enumerate(mix):
            if job.arrives == now:
                keys[index] = driver.reserve(job.request)
                driver.decode_when_admitted(keys[index], after=index % 3)
            elif job.leaves is not None and job.arrives + job.leaves == now:
                driver.release(keys[index])
                gone.add(index)
        if len(keys) == len(mix) and all(i in gone or driver.outcomes[key].is_over for i, key in keys.items()):
            return [keys[index] for index in range(len(mix))]
        driver.step()
    raise AssertionError("the engine does not come to an end")
