"""An engine one step ahead of its runner says what one says that waits for each step, whatever happens around it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import CorruptTransfer
from baton.core.types import FinishReason, StopRules, TokenRequest
from baton.engine.config import EngineConfig
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.runner import Part
from tests.failing_runner import FailingRunner, nobody
from tests.unit.engine.core_driver import STEPS, CoreDriver, Driver, prompt, request
from tests.unit.engine.job_mixes import Job, alone, check, jobs, play


def ahead(blocks: int, block_size: int, **config: int) -> CoreDriver:
    return CoreDriver(FakeRunner(fake_card(block_size=block_size), blocks, steps_ahead=1), EngineConfig(**config))  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    mix=st.lists(jobs(), min_size=1, max_size=9),
    spare=st.integers(0, 14),
    limits=st.fixed_dictionaries(
        {
            "growth_window": st.sampled_from([0, 2, 256]),
            "max_step_tokens": st.integers(1, 40),
            "max_running": st.integers(1, 8),
        }
    ),
)
@pytest.mark.parametrize("block_size", [1, 4])
def test_any_mix_under_any_pressure_is_answered_as_in_step(
    block_size: int, mix: list[Job], spare: int, limits: dict[str, int]
) -> None:
    longest = max(len(job.request.prompt) + job.request.stop.max_tokens for job in mix)
    blocks = -(-longest // block_size) + spare
    driver = ahead(blocks, block_size, **limits)
    for job, key in zip(mix, play(driver, mix), strict=True):
        check(job, driver.outcomes[key])
    driver.assert_idle()
    assert driver.stats.free_blocks + driver.stats.cached_blocks == blocks


# --- what is seen one step late ---------------------------------------------------------------------------------------


def rows_of(steps: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    return [row for step in steps for row in step]


def recorded(steps: list[list[tuple[int, int]]], **config: int) -> Driver:
    """A driver one step ahead that notes (start, end) of each part of each step."""

    def note(parts: Sequence[Part]) -> None:
        steps.append([(part.start, part.end) for part in parts])

    return Driver(steps_ahead=1, on_step=note, **config)


def test_the_next_step_is_launched_before_the_token_is_known() -> None:
    steps: list[list[tuple[int, int]]] = []
    driver = recorded(steps)
    key = driver.reserve(request(prompt(5), 4))
    driver.step()
    driver.decode(key)
    driver.step()
    driver.step()
    assert (steps, driver.outcomes[key].tokens) == ([[(0, 5)], [(5, 6)]], driver.outcomes[key].tokens[:1])
    assert len(driver.outcomes[key].tokens) == 1
    driver.finish(key)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_nothing_is_computed_past_the_last_token_that_may_be_drawn(max_tokens: int) -> None:
    steps: list[list[tuple[int, int]]] = []
    driver = recorded(steps)
    outcome = driver.answer(request(prompt(9), max_tokens))
    assert outcome.chunks[-1].finish is FinishReason.LENGTH
    assert rows_of(steps) == [(0, 9), *((9 + i, 10 + i) for i in range(max_tokens - 1))]
    driver.assert_idle()


def test_a_prefill_computes_its_prompt_and_no_more() -> None:
    steps: list[list[tuple[int, int]]] = []
    driver = recorded(steps, max_step_tokens=6)
    driver.first_token(driver.prefill(request(prompt(14), 40)))
    assert rows_of(steps) == [(0, 6), (6, 12), (12, 14)]


def test_the_token_after_a_stop_id_is_computed_but_neither_told_counted_nor_cached() -> None:
    whole = alone(Job(request(prompt(9), 20), 0, None, False)).tokens
    stop = whole[6]
    wanted = request(prompt(9), stop=StopRules(20, stop_token_ids=(stop,), ignore_eos=True))
    expected = whole[: whole.index(stop) + 1]
    steps: list[list[tuple[int, int]]] = []
    driver = recorded(steps)
    outcome = driver.answer(wanted)
    assert outcome.tokens == expected
    assert driver.stats.tokens_generated == len(expected)
    assert rows_of(steps)[-1] == (8 + len(expected), 9 + len(expected))
    driver.assert_idle()
    known = len(expected) + 8  # the last token has been drawn and never computed within the answer
    assert driver.stats.cached_blocks == known // 4


def test_an_overshoot_that_needs_a_new_block_returns_it() -> None:
    """The stop id is the token that would open a block: the row in flight has taken one for it."""
    for length in range(1, 9):
        whole = alone(Job(request(prompt(length), 20), 0, None, False)).tokens
        for at in range(6):
            rules = StopRules(20, stop_token_ids=(whole[at],), ignore_eos=True)
            driver = Driver(8, steps_ahead=1, growth_window=0)
            driver.answer(request(prompt(length), stop=rules))
            driver.assert_idle()


def test_blocks_of_a_request_that_left_are_held_until_the_step_in_flight_has_finished() -> None:
    driver = Driver(8, steps_ahead=1)
    key = driver.reserve(request(prompt(8), 24))
    driver.step()
    driver.decode(key)
    driver.step()
    driver.release(key)
    assert (driver.stats.held_blocks, driver.stats.running) == (8, 0)
    driver.step()
    assert driver.stats.held_blocks == 0
    driver.assert_idle()


def test_a_token_in_flight_outlives_the_preemption_of_its_sequence() -> None:
    driver = Driver(10, steps_ahead=1, growth_window=0)
    wanted = [request(prompt(8, i), 24) for i in range(2)]
    keys = [driver.reserve(one) for one in wanted]
    driver.step()
    for key in keys:
        driver.decode(key)
    victim = driver.outcomes[keys[1]]
    before = 0
    for _ in range(STEPS):
        before = len(victim.tokens)
        driver.step()
        if driver.stats.preemptions:
            break
    assert len(victim.tokens) == before + 1
    driver.finish(*keys)
    assert [driver.outcomes[k].tokens for k in keys] == [alone(Job(w, 0, None, False)).tokens for w in wanted]
    driver.assert_idle()


def test_whoever_waits_for_blocks_in_flight_is_not_robbed_by_an_admission() -> None:
    """The victim stands at the head of the queue and would fit into the very blocks it gave up."""
    driver = Driver(10, steps_ahead=1, growth_window=0)
    keys = [driver.reserve(request(prompt(6 - 2 * i, i), 34, priority=1 - i)) for i in range(2)]
    driver.step()
    for key in keys:
        driver.decode(key)
    driver.run_until(lambda: driver.stats.preemptions > 0)
    needy = len(driver.outcomes[keys[0]].tokens)
    for _ in range(3):
        driver.step()
    assert len(driver.outcomes[keys[0]].tokens) >= needy + 2
    driver.finish(*keys)
    assert driver.stats.preemptions == 1
    driver.assert_idle()


def test_a_failed_row_fails_its_request_alone_although_the_next_one_is_in_flight() -> None:
    driver = Driver(64, steps_ahead=1)
    wanted = [request(prompt(13, i), 30) for i in range(2)]
    keys = [driver.reserve(one) for one in wanted]
    driver.step()
    for key in keys:
        driver.decode(key)
    driver.run_until(lambda: len(driver.outcomes[keys[0]].tokens) > 2)
    driver.runner.write_blocks(driver.core._live[keys[0]].blocks[1:2], b"x" * 64)
    assert isinstance(driver.finish(keys[0]).error, CorruptTransfer)
    told = len(driver.outcomes[keys[0]].tokens)
    driver.finish(keys[1])
    assert driver.outcomes[keys[1]].tokens == alone(Job(wanted[1], 0, None, False)).tokens
    assert len(driver.outcomes[keys[0]].tokens) == told
    driver.assert_idle()
    assert driver.answer(wanted[0]).cached_tokens == 0


def crowded(wanted: Sequence[TokenRequest]) -> tuple[CoreDriver, FailingRunner, list[int]]:
    """All of ``wanted`` decode in a pool that is too small for them."""
    runner = FailingRunner(FakeRunner(fake_card(block_size=4), 10, steps_ahead=1))
    driver = CoreDriver(runner, EngineConfig(growth_window=0))
    keys = [driver.reserve(one) for one in wanted]
    driver.step()
    for key in keys:
        driver.decode(key)
    return driver, runner, keys


def test_a_row_that_fails_after_its_sequence_was_preempted_is_computed_again() -> None:
    wanted = [request(prompt(8, i), 24, prompt_logprobs=1) for i in range(2)]
    driver, _, _ = crowded(wanted)
    steps = 0
    while not driver.stats.preemptions:
        driver.step()
        steps += 1
    driver, runner, keys = crowded(wanted)
    for _ in range(steps - 1):
        driver.step()
    runner.fails = lambda part: part.key == keys[1]
    driver.step()
    assert (driver.stats.preemptions, driver.stats.waiting) == (1, 1)
    runner.fails = nobody
    driver.finish(*keys)
    for key, one in zip(keys, wanted, strict=True):
        check(Job(one, 0, None, False), driver.outcomes[key])
    driver.assert_idle()


def test_filled_blocks_read_what_they_hold_at_the_end() -> None:
    driver = Driver(64, steps_ahead=1, max_step_tokens=3)
    key = driver.prefill(request(prompt(22), 40))
    read: dict[int, object] = {}
    while driver.outcomes[key].first is None:
        driver.step()
        for blocks in driver.outcomes[key].filled:
            for ordinal in range(blocks.first_block, blocks.first_block + blocks.block_count):
                if ordinal not in read:
                    read[ordinal] = driver.runner.read_blocks(driver.core._live[key].blocks[ordinal : ordinal + 1])
    assert read == {ordinal: driver.read(key, ordinal, 1) for ordinal in range(6)}
