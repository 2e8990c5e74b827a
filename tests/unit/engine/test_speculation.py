"""Drafts change how many steps an answer takes, and nothing else: not a token, a log-probability, or a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import ConfigError
from baton.core.types import FinishReason, Sampling, StopRules, TokenRequest
from baton.engine.config import EngineConfig
from baton.engine.drafter import Query
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.model_drafter import ModelDrafter
from baton.engine.runner import Part
from tests.unit.engine.core_driver import CoreDriver, prompt, request
from tests.unit.engine.job_mixes import Job, alone, check, jobs, play
from tests.unit.engine.oracles import Oracle, Wrong

STEPS_AHEAD = pytest.mark.parametrize("steps_ahead", [0, 1])
VOCABULARY = 512


def knowing(wanted: Sequence[TokenRequest], mistaken: int) -> Oracle:
    """An oracle of the answers to ``wanted``, and of how they would go on if nothing ended them."""
    endless = [replace(each, stop=StopRules(each.stop.max_tokens + 8, ignore_eos=True)) for each in wanted]
    return Oracle([_whole(each) for each in (*wanted, *endless)], VOCABULARY, mistaken)


def _whole(wanted: TokenRequest) -> list[int]:
    plain = replace(wanted, prompt_logprobs=None, logprobs=None)
    return [*wanted.prompt, *wanted.generated, *alone(Job(plain, 0, None, False)).tokens]


def speculating(
    wanted: Sequence[TokenRequest],
    steps_ahead: int,
    *,
    mistaken: int = 0,
    blocks: int = 64,
    block_size: int = 4,
    steps: list[list[Part]] | None = None,
    **config: int,
) -> CoreDriver:
    """An engine that tries an oracle's drafts; ``steps`` receives what is launched."""

    def note(parts: Sequence[Part]) -> None:
        if steps is not None:
            steps.append(list(parts))

    runner = FakeRunner(fake_card(block_size=block_size), blocks, steps_ahead=steps_ahead, on_step=note)
    settings = EngineConfig(speculation="ngram", **config)  # type: ignore[arg-type]
    return CoreDriver(runner, settings, knowing(wanted, mistaken))


@settings(max_examples=80, deadline=None)
@given(
    mix=st.lists(jobs(), min_size=1, max_size=7),
    spare=st.integers(0, 20),
    mistaken=st.sampled_from([0, 2, 5]),
    limits=st.fixed_dictionaries(
        {
            "growth_window": st.sampled_from([0, 2, 256]),
            "max_step_tokens": st.integers(1, 40),
            "max_running": st.integers(1, 8),
            "draft_tokens": st.integers(1, 9),
            "speculation_max_rows": st.integers(2, 24),
        }
    ),
)
@pytest.mark.parametrize("block_size", [1, 4])
@STEPS_AHEAD
def test_any_mix_under_any_pressure_is_answered_as_without_drafts(
    steps_ahead: int, block_size: int, mix: list[Job], spare: int, mistaken: int, limits: dict[str, int]
) -> None:
    longest = max(len(job.request.prompt) + job.request.stop.max_tokens for job in mix)
    blocks = -(-longest // block_size) + spare
    wanted = [job.request for job in mix]
    driver = speculating(wanted, steps_ahead, mistaken=mistaken, blocks=blocks, block_size=block_size, **limits)  # type: ignore[arg-type]
    for job, key in zip(mix, play(driver, mix), strict=True):
        check(job, driver.outcomes[key])
    driver.assert_idle()
    assert driver.stats.free_blocks + driver.stats.cached_blocks == blocks


# --- what drafts bring ------------------------------------------------------------------------------------------------


@STEPS_AHEAD
def test_right_drafts_save_steps(steps_ahead: int) -> None:
    wanted = request(prompt(9), 25)
    driver = speculating([wanted], steps_ahead, draft_tokens=7)
    assert driver.answer(wanted).tokens == alone(Job(wanted, 0, None, False)).tokens
    assert driver.stats.steps == 4 + steps_ahead  # one token, then up to eight a step; one ahead, the second alone
    assert driver.stats.draft_tokens_accepted == driver.stats.draft_tokens_proposed == 25 - driver.stats.steps


@STEPS_AHEAD
def test_tokens_of_one_step_come_in_one_chunk(steps_ahead: int) -> None:
    wanted = request(prompt(9), 25, logprobs=1)
    driver = speculating([wanted], steps_ahead, draft_tokens=7)
    chunks = driver.answer(wanted).chunks
    assert len(chunks) == driver.stats.steps
    assert [len(chunk.logprobs) for chunk in chunks] == [len(chunk.token_ids) for chunk in chunks]


@STEPS_AHEAD
def test_an_answer_ends_at_a_stop_id_inside_right_drafts(steps_ahead: int) -> None:
    whole = alone(Job(request(prompt(9), 30), 0, None, False)).tokens
    for at in range(12):
        stop = StopRules(30, stop_token_ids=(whole[at],), ignore_eos=True)
        wanted = request(prompt(9), stop=stop)
        driver = speculating([wanted], steps_ahead, draft_tokens=9)
        outcome = driver.answer(wanted)
        expected = whole[: whole.index(whole[at]) + 1]
        assert (outcome.tokens, outcome.chunks[-1].finish) == (expected, FinishReason.STOP)
        assert driver.stats.tokens_generated == len(expected)
        driver.assert_idle()
        assert driver.stats.cached_blocks == (8 + len(expected)) // 4, "the last token has not been computed"


@STEPS_AHEAD
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, 10])
def test_nothing_is_drafted_past_the_last_token_that_may_be_drawn(steps_ahead: int, max_tokens: int) -> None:
    steps: list[list[Part]] = []
    wanted = request(prompt(9), max_tokens)
    driver = speculating([wanted], steps_ahead, blocks=-(-(9 + max_tokens) // 4), steps=steps)
    assert len(driver.answer(wanted).tokens) == max_tokens
    assert max(part.end + len(part.drafts) for [part] in steps) == 9 + max_tokens - 1


@STEPS_AHEAD
def test_all_draws_of_a_part_are_before_min_tokens_or_none_is(steps_ahead: int) -> None:
    steps: list[list[Part]] = []
    stop = StopRules(24, min_tokens=11, stop_token_ids=tuple(range(0, 512, 3)))
    wanted = request(prompt(9), stop=stop)
    driver = speculating([wanted], steps_ahead, steps=steps, draft_tokens=9)
    assert driver.answer(wanted).tokens == alone(Job(wanted, 0, None, False)).tokens
    for [part] in steps:
        if part.drafts:
            assert part.draw is not None
            assert bool(part.draw.forbidden) == (part.end < 9 + 11)
            assert bool(part.draw.forbidden) == (part.end + len(part.drafts) < 9 + 11)


# --- when there are none ----------------------------------------------------------------------------------------------


@STEPS_AHEAD
@pytest.mark.parametrize(
    "fields",
    [
        {"speculation": False},
        {"sampling": Sampling(repetition_penalty=1.1)},
        {"sampling": Sampling(frequency_penalty=0.1)},
        {"sampling": Sampling(temperature=0.8, presence_penalty=-0.1)},
    ],
)
def test_no_drafts_for_those_who_want_none_or_have_penalties(steps_ahead: int, fields: dict[str, Any]) -> None:
    wanted = request(prompt(9), 25, **fields)
    driver = speculating([wanted], steps_ahead)
    driver.answer(wanted)
    assert (driver.stats.steps, driver.stats.draft_tokens_proposed) == (25, 0)


@STEPS_AHEAD
def test_wrong_drafts_become_rare(steps_ahead: int) -> None:
    wanted = request(prompt(9), 600)
    driver = speculating([wanted], steps_ahead, blocks=200)
    driver.core._speculator._drafter = Wrong()
    driver.answer(wanted)
    assert driver.stats.draft_tokens_accepted == 0
    assert 0 < driver.stats.draft_tokens_proposed < 20 * 7


@STEPS_AHEAD
def test_a_drafter_that_recovers_is_tried_again(steps_ahead: int) -> None:
    wanted = request(prompt(9), 800)
    driver = speculating([wanted], steps_ahead, blocks=250)
    oracle, driver.core._speculator._drafter = driver.core._speculator._drafter, Wrong()
    key = driver.reserve(wanted)
    driver.decode_when_admitted(key)
    driver.run_until(lambda: len(driver.outcomes[key].tokens) > 100)
    driver.core._speculator._drafter = oracle
    driver.finish(key)
    assert driver.stats.draft_tokens_accepted > 300


@STEPS_AHEAD
@pytest.mark.parametrize(("rows", "drafts"), [(5, 0), (6, 1), (23, 15), (64, 35)])
def test_a_step_has_no_more_rows_than_speculation_may_fill(steps_ahead: int, rows: int, drafts: int) -> None:
    wanted = [request(prompt(5, i), 60) for i in range(5)]
    steps: list[list[Part]] = []
    driver = speculating(wanted, steps_ahead, blocks=300, steps=steps, speculation_max_rows=rows)
    keys = [driver.reserve(each) for each in wanted]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    assert max(sum(len(part.drafts) for part in parts) for parts in steps if len(parts) == 5) == drafts
    assert all(len(parts) + sum(len(part.drafts) for part in parts) <= max(rows, 5) for parts in steps)


@STEPS_AHEAD
def test_drafts_get_what_prompts_leave_of_a_step(steps_ahead: int) -> None:
    steps: list[list[Part]] = []
    for length in range(90, 105):
        wanted = request(prompt(5), 60)
        driver = speculating([wanted], steps_ahead, blocks=300, steps=steps, max_step_tokens=16)
        keys = [driver.reserve(wanted), driver.reserve(request(prompt(length, 9), 1))]
        for key in keys:
            driver.decode_when_admitted(key)
        driver.finish(*keys)
    assert max(sum(part.end - part.start + len(part.drafts) for part in parts) for parts in steps) == 16
    assert any(len(parts) == 2 and parts[0].drafts for parts in steps)


def test_a_step_waits_for_tokens_only_if_its_drafts_are_worth_it() -> None:
    """One of many that decode has drafts: the others go on running ahead until it is nearly alone."""
    crowd = [request(prompt(5, i), 20, speculation=False) for i in range(12)]
    wanted = request(prompt(9), 80)
    driver = speculating([wanted], 1, blocks=400, max_running=20)
    keys = [driver.reserve(each) for each in crowd]
    favoured = driver.reserve(wanted)
    for key in (*keys, favoured):
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    assert driver.stats.draft_tokens_proposed == 0
    driver.finish(favoured)
    assert driver.stats.draft_tokens_accepted > 40


# --- blocks -----------------------------------------------------------------------------------------------------------


@STEPS_AHEAD
def test_nobody_loses_blocks_for_the_sake_of_drafts(steps_ahead: int) -> None:
    """As many blocks as all answers need to their ends: any block taken for a draft beyond them would be missed."""
    wanted = [request(prompt(7, i), 33) for i in range(4)]
    driver = speculating(wanted, steps_ahead, blocks=4 * 10, growth_window=0, draft_tokens=9)
    keys = [driver.reserve(each) for each in wanted]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    assert driver.stats.preemptions == 0
    assert driver.stats.draft_tokens_accepted > 40
    driver.assert_idle()


def test_drafts_in_flight_outlive_the_preemption_of_their_sequence() -> None:
    """Who needs blocks is planned in the same step that drafts are in flight: their right tokens are kept."""
    seen = 0
    for spare in range(8):
        wanted = [request(prompt(8, i), 40, priority=1 - i) for i in range(3)]
        driver = speculating(wanted, 1, blocks=12 + spare, growth_window=0, draft_tokens=5)
        oracle = driver.core._speculator
        oracle.waits = lambda running: False  # type: ignore[method-assign]  # plan while drafts are in flight
        keys = [driver.reserve(each) for each in wanted]
        for key in keys:
            driver.decode_when_admitted(key)
        preempted = 0
        while not all(driver.outcomes[key].is_over for key in keys):
            verifying = [len(part.drafts) for flight in driver.core._flights for part in flight.step.parts]
            driver.step()
            seen += driver.stats.preemptions > preempted and any(verifying)
            preempted = driver.stats.preemptions
        for job, key in zip(wanted, keys, strict=True):
            check(Job(job, 0, None, False), driver.outcomes[key])
        driver.assert_idle()
    assert seen


# --- a model that drafts ----------------------------------------------------------------------------------------------


@STEPS_AHEAD
def test_a_model_that_drafts_is_right_where_it_agrees(steps_ahead: int) -> None:
    """Greedy drafts of the same fake model are always right for greedy answers, and never needed for sampled ones."""
    wanted = [request(prompt(9 + i, i), 40, sampling=Sampling(temperature=i % 2, seed=i)) for i in range(4)]
    config = EngineConfig(speculation="model", draft_model="fake", draft_tokens=5)
    draft_runner = FakeRunner(fake_card(block_size=8), 40)
    drafter = ModelDrafter(draft_runner, fake_card(), config)
    runner = FakeRunner(fake_card(block_size=4), 100, steps_ahead=steps_ahead)
    driver = CoreDriver(runner, config, drafter)
    keys = [driver.reserve(each) for each in wanted]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    for job, key in zip(wanted, keys, strict=True):
        check(Job(job, 0, None, False), driver.outcomes[key])
    driver.assert_idle()
    assert driver.stats.draft_tokens_accepted > 50
    assert drafter._pool.free == drafter._pool.total


def test_a_draft_model_without_room_or_time_has_no_drafts() -> None:
    config = EngineConfig(speculation="model", draft_model="fake", max_step_tokens=8)
    drafter = ModelDrafter(FakeRunner(fake_card(block_size=4), 6), fake_card(), config)
    context = list(prompt(20))
    assert drafter.propose([Query(1, context, 6)]) == [()]  # more blocks than there are
    assert drafter.propose([Query(1, context, 4)]) == [()]  # 8 of 20 tokens read
    assert drafter.propose([Query(2, context, 4)]) == [()]  # the first one has the blocks
    assert drafter.propose([Query(1, context, 4)]) == [()]
    [drafts] = drafter.propose([Query(1, context, 4)])
    assert list(drafts) == alone(Job(request(prompt(20), 4), 0, None, False)).tokens
    drafter.forget(1)
    assert drafter._pool.free == 6


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    config = EngineConfig(speculation="model", draft_model="fake")
    with pytest.raises(ConfigError, match=r"engine\.draft_model: must have the vocabulary .* 512 tokens, got 300"):
        ModelDrafter(FakeRunner(fake_card(vocab_size=300), 6), fake_card(), config)
