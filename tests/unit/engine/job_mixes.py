"""Mixes of requests that come and go, played on an engine, and what each of them must be told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from baton.core.types import Sampling, StopRules, Tier, TokenRequest
from tests.unit.engine.core_driver import STEPS, CoreDriver, Driver, Outcome, prompt, request

SAMPLINGS = (Sampling(), Sampling(temperature=0.7, seed=11, repetition_penalty=1.1))


@dataclass(frozen=True)
class Job:
    """``leaves``: so many steps after its arrival its client gives up; None: it stays to the end."""

    request: TokenRequest
    arrives: int
    leaves: int | None
    is_prefill: bool


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Shared prefixes, and stop ids that are drawn at any point: a prompt's answer hits one id in ``rarity``."""
    tokens = (*prompt(draw(st.integers(0, 12))), *prompt(draw(st.integers(1, 8)), draw(st.integers(0, 2))))
    generated = prompt(draw(st.integers(0, 2)), 5)
    new = draw(st.integers(1, 16))
    rarity = draw(st.sampled_from([4, 8, 512]))
    stop = StopRules(
        len(generated) + new,
        min_tokens=draw(st.integers(0, len(generated) + new)),
        stop_token_ids=tuple(range(draw(st.integers(0, 3)), 512, rarity)),
        ignore_eos=draw(st.booleans()),
    )
    wanted = request(
        tokens,
        generated=generated,
        priority=draw(st.integers(0, 2)),
        tenant=draw(st.sampled_from("ab")),
        tier=draw(st.sampled_from(Tier)),
        sampling=draw(st.sampled_from(SAMPLINGS)),
        logprobs=draw(st.sampled_from([None, None, 1])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        stop=stop,
    )
    leaves = draw(st.one_of(st.none(), st.none(), st.integers(0, 25)))
    return Job(wanted, draw(st.integers(0, 20)), leaves, draw(st.sampled_from([False, False, False, True])))


def alone(job: Job) -> Outcome:
    """What an engine in step answers that has nothing else to do."""
    driver = Driver(512, steps_ahead=0)
    if not job.is_prefill:
        return driver.answer(job.request)
    key = driver.prefill(job.request)
    driver.first_token(key)
    return driver.outcomes[key]


def play(driver: CoreDriver, mix: Sequence[Job]) -> list[int]:
    """Every arrival and departure, until nobody is left; returns the keys in the order of ``mix``."""
    keys: dict[int, int] = {}
    gone: set[int] = set()
    for now in range(STEPS):
        for index, job in enumerate(mix):
            if job.arrives == now:
                keys[index] = driver.prefill(job.request) if job.is_prefill else driver.reserve(job.request)
                if not job.is_prefill:
                    driver.decode_when_admitted(keys[index], after=index % 3)
            elif index in keys and index not in gone and _leaves(driver, job, keys[index], now):
                driver.release(keys[index])
                gone.add(index)
        if len(keys) == len(mix) and all(i in gone or driver.outcomes[key].is_over for i, key in keys.items()):
            return [keys[index] for index in range(len(mix))]
        driver.step()
    raise AssertionError("the engine does not come to an end")


def _leaves(driver: CoreDriver, job: Job, key: int, now: int) -> bool:
    is_done = driver.outcomes[key].first is not None
    return is_done or (job.leaves is not None and job.arrives + job.leaves == now)


def check(job: Job, found: Outcome) -> None:
    expected = alone(job)
    assert found.error is None
    if job.is_prefill:
        check_prefill(found, expected)
        return
    count = len(found.tokens)
    assert found.tokens == expected.tokens[:count]
    assert told(found, "logprobs") == told(expected, "logprobs")[:count]
    assert told(found, "prompt_logprobs") in ([], told(expected, "prompt_logprobs"))
    assert not any(chunk.finish for chunk in found.chunks[:-1])
    if found.is_over:
        assert count == len(expected.tokens)
        last, usage = found.chunks[-1], found.chunks[-1].usage
        assert last.finish == expected.chunks[-1].finish
        assert usage is not None
        assert usage.completion_tokens == len(job.request.generated) + count
    else:
        assert job.leaves is not None


def told(outcome: Outcome, field: str) -> list[object]:
    """What all chunks of an answer have of ``field``."""
    return [value for chunk in outcome.chunks for value in getattr(chunk, field)]


def check_prefill(found: Outcome, expected: Outcome) -> None:
    assert expected.first is not None
    at = 0
    for blocks in found.filled:
        assert (blocks.first_block, blocks.block_count > 0) == (at, True)
        at += blocks.block_count
    if found.first is not None:
        usage_limit = expected.first.usage.prompt_tokens
        usage = dataclasses.replace(expected.first.usage, cached_tokens=min(found.cached_tokens or 0, usage_limit))
        assert found.first == dataclasses.replace(expected.first, usage=usage)
        assert found.filled[-1].tokens == expected.filled[-1].tokens
