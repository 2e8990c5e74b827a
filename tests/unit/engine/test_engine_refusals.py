from __future__ import annotations

import dataclasses

import pytest

from baton.core.errors import Expired, InvalidRequest, Overloaded, TransferRejected
from baton.core.types import FirstToken, Sampling, StopRules, Usage
from baton.engine.messages import Decode, Release
from baton.engine.runner import RunnerTimes
from tests.unit.engine.core_driver import Driver, prompt, request
from tests.unit.engine.core_modes import alone, steps_ahead

__all__ = ["steps_ahead"]  # a fixture of every test here


def test_releasing_at_any_stage_frees_everything_before_the_next_step() -> None:
    seen: set[str] = set()
    for steps in range(60):
        driver = Driver(10, growth_window=0, max_step_tokens=4)
        keys = [driver.reserve(request(prompt(9, i), 20)) for i in range(2)]
        keys.append(driver.prefill(request(prompt(9, 8))))
        for key in keys[:2]:
            driver.decode_when_admitted(key, after=3)
        for _ in range(steps):
            driver.step()
        seen.update(sequence.stage for sequence in driver.core._live.values())
        for key in keys:
            driver.release(key)
        driver.assert_idle()
        assert driver.stats.free_blocks + driver.stats.cached_blocks == 10
    assert seen == {"waiting", "held", "running", "pinned"}


def test_a_full_queue_refuses_at_once_and_says_when_to_retry() -> None:
    driver = Driver(4, max_waiting=2)
    held = driver.reserve(request(prompt(12)[:8], 8))
    driver.step()
    keys = [driver.reserve(request(prompt(8), 8)) for _ in range(3)]
    driver.step()
    error = driver.outcomes[keys[2]].error
    assert isinstance(error, Overloaded)
    assert 0 < error.retry_after <= 10
    assert driver.stats.waiting == 2
    assert not driver.core.has_work, "nothing can be done until blocks are released: the engine must sleep"
    for key in (held, *keys):
        driver.release(key)
    driver.assert_idle()


def test_the_queue_goes_by_priority_then_arrival_and_nobody_overtakes_the_head() -> None:
    driver = Driver(4)
    holder = driver.reserve(request(prompt(8), 8))
    driver.step()
    low, small, high = (
        driver.reserve(request(prompt(8, 1), 8)),
        driver.reserve(request(prompt(1, 2), 1)),
        driver.reserve(request(prompt(8, 3), 8, priority=1)),
    )
    order: list[int] = []
    for _ in range(8):
        driver.step()
        order += [k for k in (low, small, high) if driver.outcomes[k].cached_tokens is not None and k not in order]
        driver.release([holder, *order][-1])
    assert order == [high, low, small]


def test_a_request_past_its_deadline_is_told_so_wherever_it_is() -> None:
    driver = Driver(4)
    running = driver.reserve(request(prompt(8), 8, timeout=5.0))
    driver.step()
    driver.decode(running)
    waiting = driver.reserve(request(prompt(8, 1), 8, timeout=2.0))
    driver.step()
    assert driver.core.idle_seconds() == 2.0
    driver.clock.advance(2.0)
    driver.step()
    assert isinstance(driver.outcomes[waiting].error, Expired)
    driver.clock.advance(3.0)
    driver.step()
    assert isinstance(driver.outcomes[running].error, Expired)
    driver.assert_idle()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt", {"prompt": ()}),
        ("prompt", {"prompt": (5, 512)}),
        ("prompt", {"prompt": (5, -1)}),
        ("generated", {"generated": (512,)}),
        ("generated", {"generated": (5,) * 8}),
        ("max_tokens", {"stop": StopRules(max_tokens=0)}),
        ("min_tokens", {"stop": StopRules(max_tokens=4, min_tokens=5)}),
        ("stop_token_ids", {"stop": StopRules(stop_token_ids=(600,))}),
        ("prompt", {"prompt": prompt(250)}),
        ("temperature", {"sampling": Sampling(temperature=float("nan"))}),
        ("temperature", {"sampling": Sampling(temperature=-1)}),
        ("top_p", {"sampling": Sampling(top_p=0)}),
        ("min_p", {"sampling": Sampling(min_p=2)}),
        ("top_k", {"sampling": Sampling(top_k=-1)}),
        ("repetition_penalty", {"sampling": Sampling(repetition_penalty=0)}),
        ("logit_bias", {"sampling": Sampling(logit_bias=((512, 1.0),))}),
        ("logit_bias", {"sampling": Sampling(logit_bias=((5, float("inf")),))}),
        ("logprobs", {"logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 513}),
    ],
)
def test_bad_input_is_refused_by_field_and_the_engine_goes_on(field: str, changes: dict[str, object]) -> None:
    driver = Driver(64)
    key = driver.reserve(dataclasses.replace(request(prompt(8)), **changes))  # type: ignore[arg-type]
    driver.step()
    error = driver.outcomes[key].error
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert field in error.message
    assert len(driver.answer(request(prompt(8))).tokens) == 8
    driver.assert_idle()


def test_a_request_that_fits_the_context_but_not_the_pool_is_refused_with_both_numbers() -> None:
    driver = Driver(4)
    key = driver.reserve(request(prompt(10), 7))
    driver.step()
    error = driver.outcomes[key].error
    assert isinstance(error, InvalidRequest)
    assert "at most 16 (the KV pool)" in error.message
    assert "10 + 7 = 17" in error.message


def test_commands_for_requests_that_are_gone_are_harmless() -> None:
    driver = Driver()
    driver.core.handle(Release(99))
    driver.core.handle(Decode(99, None))
    driver.assert_idle()


def test_decoding_twice_fails_the_request() -> None:
    driver = Driver()
    key = driver.reserve(request(prompt(5), 30))
    driver.step()
    driver.decode(key)
    driver.decode(key)
    assert isinstance(driver.finish(key).error, InvalidRequest)
    driver.assert_idle()


def test_a_first_token_outside_the_vocabulary_fails_the_request() -> None:
    driver = Driver()
    key = driver.reserve(request(prompt(5)))
    driver.step()
    driver.decode(key, FirstToken(512, Usage(5, 0, 1)))
    assert isinstance(driver.finish(key).error, TransferRejected)
    driver.assert_idle()


def test_starts_by_itself_only_with_little_enough_left_to_compute() -> None:
    driver = Driver(64)
    wanted = request(prompt(9))
    expected = alone(wanted)
    waits = driver.reserve(wanted, 8)
    driver.step()
    driver.step()
    assert not driver.outcomes[waits].chunks
    driver.release(waits)
    starts = driver.reserve(wanted, 9)
    assert driver.finish(starts).tokens == expected
    cached = driver.reserve(wanted, 1)  # 8 of 9 tokens are found
    assert driver.finish(cached).tokens == expected
    driver.assert_idle()


def test_a_request_that_has_started_by_itself_takes_no_first_token() -> None:
    driver = Driver(64)
    key = driver.reserve(request(prompt(9)), 9)
    driver.step()
    driver.decode(key, FirstToken(7, Usage(9, 0, 1), None, (), None))
    driver.step()
    assert isinstance(driver.outcomes[key].error, InvalidRequest)
    driver.assert_idle()


def test_waiting_for_the_device_is_no_work_of_the_host() -> None:
    driver = Driver(64)
    driver.runner.times = RunnerTimes(waited=0.5, device=1.75, device_idle=0.25)
    driver.core.add_busy(2.0)
    stats = driver.stats
    assert (stats.host_seconds, stats.device_seconds, stats.device_idle_seconds) == (1.5, 1.75, 0.25)


def test_the_hosts_time_never_shrinks_while_a_turn_of_the_loop_is_under_way() -> None:
    driver = Driver(64)
    driver.core.add_busy(2.0)
    driver.runner.times = RunnerTimes(
        waited=0.5
    )  # a step was collected, and the report of it leaves before the turn ends
    assert driver.stats.host_seconds == 2.0
    driver.core.add_busy(0.75)
    assert driver.stats.host_seconds == 2.25
