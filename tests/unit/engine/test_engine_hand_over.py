from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import CorruptTransfer, TransferRejected
from baton.core.types import FilledBlocks, FinishReason, FirstToken, Sampling, StopRules, TokenRequest, Usage
from baton.engine.config import EngineConfig
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.messages import Admitted, Event, Filled
from tests.failing_runner import FailingRunner, ends_at, nobody
from tests.unit.engine.core_driver import CoreDriver, Driver, prompt, request
from tests.unit.engine.core_modes import SAMPLED, alone, steps_ahead

__all__ = ["steps_ahead"]  # a fixture of every test here


def hand_over(source: Driver, target: Driver, wanted: TokenRequest) -> tuple[FirstToken, int]:
    """Prefill on ``source``, copy the blocks to a reservation on ``target``, start it; returns its key there."""
    here, there = source.prefill(wanted), target.reserve(wanted)
    target.step()
    first = source.first_token(here)
    skip = (target.outcomes[there].cached_tokens or 0) // 4
    for blocks in source.outcomes[here].filled:
        for ordinal in range(max(blocks.first_block, skip), blocks.first_block + blocks.block_count):
            payload = source.read(here, ordinal, 1)
            assert isinstance(payload, bytes)
            assert target.write(there, ordinal, payload) is None
    source.release(here)
    target.decode(there, first)
    return first, there


def test_a_prefill_reports_blocks_as_they_fill_and_keeps_them_until_released() -> None:
    driver = Driver(64, max_step_tokens=6)
    key = driver.prefill(request(prompt(14), 40))
    first = driver.first_token(key)
    assert first.finish is None
    assert first.usage == Usage(14, 0, 1)
    assert driver.outcomes[key].filled == [FilledBlocks(0, 1, 4), FilledBlocks(1, 2, 12), FilledBlocks(3, 1, 14)]
    assert (driver.stats.held_blocks, driver.core.has_work) == (4, False)
    driver.release(key)
    driver.assert_idle()


def test_a_prefill_reports_cached_blocks_at_once() -> None:
    driver = Driver(64)
    driver.answer(request(prompt(12), 1))
    key = driver.prefill(request(prompt(14)))
    assert driver.first_token(key).usage.cached_tokens == 12
    assert driver.outcomes[key].filled == [FilledBlocks(0, 3, 12), FilledBlocks(3, 1, 14)]


def test_blocks_are_told_of_before_the_step_that_fills_them_has_its_results(steps_ahead: int) -> None:
    driver, told = Driver(64, max_step_tokens=6), list[Event]()

    def look() -> None:
        driver.core.look()
        told.extend(driver.core.news().events if driver.core.has_news else ())

    driver.runner.while_waiting(look)
    key = driver.prefill(request(prompt(14), 40))
    driver.first_token(key)
    parts = [FilledBlocks(0, 1, 4), FilledBlocks(1, 2, 12), FilledBlocks(3, 1, 14)]
    filled = [event for event in told if not isinstance(event, Admitted)]
    assert filled == [Filled(key, part, is_last=part is parts[-1]) for part in parts]
    assert not driver.outcomes[key].filled, "what was told is not told again"
    driver.release(key)
    driver.assert_idle()


def test_a_prefill_that_fails_after_its_blocks_were_told_of_says_so_and_is_not_found_again() -> None:
    fake = FakeRunner(fake_card(block_size=4), 64, steps_ahead=Driver.steps_ahead)
    runner = FailingRunner(fake, ends_at(14))
    driver = CoreDriver(runner, EngineConfig(max_step_tokens=6))
    runner.while_waiting(driver.core.look)
    key = driver.prefill(request(prompt(14)))
    driver.run_until(lambda: driver.outcomes[key].error is not None)
    assert [blocks.tokens for blocks in driver.outcomes[key].filled] == [4, 12, 14]
    runner.fails = nobody
    assert driver.answer(request(prompt(14))).cached_tokens == 0
    driver.assert_idle()


def test_blocks_are_not_told_of_while_their_kv_is_being_computed() -> None:
    driver = Driver(64)
    driver.prefill(request(prompt(14)))
    driver.core.admit()
    driver.core._launch()
    driver.core.look()
    assert not any(isinstance(event, Filled) for event in driver.core.report().events)


def test_a_prefill_that_is_released_while_its_step_is_in_flight_is_told_nothing_more() -> None:
    driver = Driver(64)
    driver.runner.while_waiting(driver.core.look)
    key = driver.prefill(request(prompt(14)))
    driver.core.admit()
    driver.core._launch()
    driver.release(key)
    driver.assert_idle()
    assert driver.outcomes[key].filled == []


def test_a_prefill_whose_first_token_is_the_last_says_so() -> None:
    driver = Driver()
    limit = driver.first_token(driver.prefill(request(prompt(9), 1)))
    assert limit.finish is FinishReason.LENGTH
    rules = StopRules(max_tokens=9, stop_token_ids=(limit.token_id,))
    stop = driver.first_token(driver.prefill(request(prompt(9), stop=rules)))
    assert (stop.token_id, stop.finish) == (limit.token_id, FinishReason.STOP)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(0, 30), st.integers(1, 9), st.sampled_from([Sampling(), SAMPLED]), st.booleans())
def test_a_handed_over_request_answers_like_one_engine_field_by_field(
    length: int, known: int, max_tokens: int, sampling: Sampling, with_prompt: bool
) -> None:
    extras = {"logprobs": 2, "prompt_logprobs": 1 if with_prompt else None, "sampling": sampling}
    wanted = request(prompt(length), max_tokens + 1, **extras)
    whole = Driver().answer(wanted)
    source, target = Driver(max_step_tokens=7), Driver()
    if known:
        target.answer(request(prompt(known), 1))
    computed = target.stats.prompt_tokens_computed
    first, key = hand_over(source, target, wanted)
    rest = target.finish(key)
    assert [first.token_id, *rest.tokens] == whole.tokens
    assert (first.logprob,) == whole.chunks[0].logprobs
    assert first.prompt_logprobs == whole.chunks[0].prompt_logprobs
    assert first.usage == whole.chunks[0].usage
    assert [c.logprobs for c in rest.chunks] == [c.logprobs for c in whole.chunks[1:]]
    assert rest.chunks[-1].usage == whole.chunks[-1].usage
    assert target.stats.prompt_tokens_computed == computed
    source.assert_idle()
    target.assert_idle()


def test_a_handed_over_request_that_is_preempted_recomputes_and_goes_on() -> None:
    wanted = [request(prompt(8, i), 24) for i in range(3)]
    source, target = Driver(), Driver(10, growth_window=0)
    keys: list[int] = []
    firsts: list[int] = []
    for one in wanted:
        first, key = hand_over(source, target, one)
        keys.append(key)
        firsts.append(first.token_id)
    target.finish(*keys)
    assert target.stats.preemptions > 0
    for one, first, key in zip(wanted, firsts, keys, strict=True):
        assert [first, *target.outcomes[key].tokens] == alone(one)
    target.assert_idle()


def test_swapped_blocks_fail_their_request_alone_and_are_not_found_again() -> None:
    wanted = request(prompt(13), 6)
    source, target = Driver(), Driver()
    bystander = target.reserve(request(prompt(6, 3), 30))
    target.step()
    target.decode(bystander)
    here, there = source.prefill(wanted), target.reserve(wanted)
    first = source.first_token(here)
    blocks = [source.read(here, i, 1) for i in (1, 0, 2, 3)]
    target.step()
    for i, payload in enumerate(blocks):
        assert isinstance(payload, bytes)
        assert target.write(there, i, payload) is None
    target.decode(there, first)
    outcome = target.finish(there)
    assert isinstance(outcome.error, CorruptTransfer)
    assert target.answer(wanted).cached_tokens == 0
    target.finish(bystander)
    assert target.outcomes[bystander].tokens == alone(request(prompt(6, 3), 30))
    target.assert_idle()


def test_blocks_of_a_request_that_failed_late_are_not_found_again() -> None:
    driver = Driver()
    wanted = request(prompt(13), 40)
    key = driver.reserve(wanted)
    driver.step()
    driver.decode(key)
    driver.run_until(lambda: len(driver.outcomes[key].tokens) > 2)
    driver.runner.write_blocks(driver.core._live[key].blocks[1:2], b"x" * 64)
    assert isinstance(driver.finish(key).error, CorruptTransfer)
    driver.assert_idle()
    assert driver.stats.cached_blocks == 0
    again = driver.answer(wanted)
    assert (again.cached_tokens, again.tokens) == (0, alone(wanted))


def test_a_preempted_request_reports_its_prompt_once_and_whole() -> None:
    """Preempted in the middle of its prompt, it owes all the log-probabilities again."""
    driver = Driver(10, growth_window=0, max_step_tokens=4)
    wanted = [request(prompt(4), 32, priority=1), request(prompt(28, 1), 4, prompt_logprobs=1)]
    keys = [driver.reserve(one) for one in wanted]
    driver.step()
    driver.decode(keys[0])
    driver.run_until(lambda: len(driver.outcomes[keys[0]].tokens) == 5)
    driver.decode(keys[1])
    driver.run_until(lambda: driver.stats.preemptions > 0)
    assert not driver.outcomes[keys[1]].chunks
    driver.finish(*keys)
    outcome, expected = driver.outcomes[keys[1]], Driver().answer(wanted[1])
    assert outcome.chunks == expected.chunks


def test_a_reservation_may_still_compute_for_itself_after_some_blocks_were_written() -> None:
    wanted = request(prompt(13), 6)
    driver = Driver()
    key = driver.reserve(wanted)
    driver.step()
    driver.write(key, 1, b"x" * 64)
    driver.decode(key)
    assert driver.finish(key).tokens == alone(wanted)


def test_writes_reach_only_the_blocks_of_a_held_reservation() -> None:
    driver = Driver()
    driver.answer(request(prompt(8), 1))
    key = driver.reserve(request(prompt(13)))
    driver.step()
    assert driver.outcomes[key].cached_tokens == 8
    block = b"x" * 64
    for first, payload in ((1, block), (4, block), (3, block * 2), (2, block[:-1]), (2, b"")):
        assert isinstance(driver.write(key, first, payload), TransferRejected)
    assert driver.write(key, 2, block * 2) is None
    assert driver.read(key, 2, 2) == block * 2
    driver.release(key)
    assert isinstance(driver.write(key, 2, block), TransferRejected)
    assert isinstance(driver.read(key, 2, 1), TransferRejected)
    driver.assert_idle()


def test_an_imported_first_token_that_ends_the_answer_ends_it() -> None:
    driver = Driver()
    key = driver.reserve(request(prompt(5), 1))
    driver.step()
    driver.decode(key, FirstToken(7, Usage(5, 0, 1)))
    outcome = driver.finish(key)
    assert (outcome.tokens, outcome.chunks[-1].finish) == ([], FinishReason.LENGTH)
    driver.assert_idle()


def test_a_handed_over_context_can_be_found_once_its_first_step_has_been_computed() -> None:
    source, target = Driver(64), Driver(64, steps_ahead=1)
    _, key = hand_over(source, target, request(prompt(14), 8))
    target.core.admit()
    target.core.report()
    assert target.core._launch()
    assert target.core.report().change is None
    target.core._collect()
    change = target.core.report().change
    assert change is not None
    assert len(change.added) == 3
    target.release(key)


def test_nobody_finds_blocks_that_no_step_has_read_yet() -> None:
    """Or one request's wrong blocks would be the end of another one, which came while its step was computed."""
    wanted = request(prompt(13), 6)
    source, target = Driver(), Driver()
    here, there = source.prefill(wanted), target.reserve(wanted)
    first = source.first_token(here)
    blocks = [source.read(here, i, 1) for i in (1, 0, 2, 3)]
    target.step()
    for i, payload in enumerate(blocks):
        assert isinstance(payload, bytes)
        assert target.write(there, i, payload) is None
    target.decode(there, first)
    target.step()
    bystander = target.reserve(wanted)
    target.step()
    target.decode(bystander)
    assert target.finish(bystander).tokens == alone(wanted)
    assert isinstance(target.outcomes[there].error, CorruptTransfer)
    target.assert_idle()
