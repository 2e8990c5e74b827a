"""A request's own limit on its chunks: no step computes more of it, and what it leaves of a step goes to others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.engine.runner import Part
from tests.unit.engine.core_driver import Driver, prompt, request
from tests.unit.engine.core_modes import alone, steps_ahead

__all__ = ["steps_ahead"]  # a fixture of every test here


class Steps:
    """What each step computed: tokens by key."""

    def __init__(self) -> None:
        self.tokens: list[dict[int, int]] = []

    def __call__(self, parts: Sequence[Part]) -> None:
        self.tokens.append({part.key: part.end - part.start for part in parts})

    def of(self, key: int) -> list[int]:
        return [step[key] for step in self.tokens if key in step]


@pytest.mark.parametrize("limit", [1, 3, 8, 20, 99])
def test_no_step_computes_more_of_a_request_than_it_allows(limit: int) -> None:
    steps = Steps()
    driver = Driver(64, on_step=steps)
    wanted = request(prompt(20), 4, max_chunk_tokens=limit)
    key = driver.reserve(wanted)
    driver.step()
    driver.decode(key)
    assert driver.finish(key).tokens == alone(wanted)
    chunks = -(-20 // limit)
    assert steps.of(key) == [limit] * (chunks - 1) + [20 - limit * (chunks - 1)] + [1] * 3
    driver.assert_idle()


def test_a_long_prompt_with_a_limit_leaves_its_step_to_a_short_one() -> None:
    """Without the limit the long one, which came first, fills the step alone."""
    for limit, shared in ((None, [16]), (10, [10, 6])):
        steps = Steps()
        driver = Driver(64, max_step_tokens=16, on_step=steps)
        keys = [driver.reserve(request(prompt(40), max_chunk_tokens=limit)), driver.reserve(request(prompt(6, 1)))]
        driver.step()
        for key in keys:
            driver.decode(key)
        driver.finish(*keys)
        assert list(steps.tokens[0].values()) == shared
        driver.assert_idle()


def test_a_preempted_request_is_recomputed_within_its_limit() -> None:
    steps = Steps()
    driver = Driver(8, growth_window=0, on_step=steps)
    wanted = [request(prompt(9, salt), 12, max_chunk_tokens=4) for salt in range(2)]
    keys = [driver.reserve(each) for each in wanted]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    assert driver.stats.preemptions > 0
    assert max(tokens for key in keys for tokens in steps.of(key)) == 4
    assert [driver.outcomes[key].tokens for key in keys] == [alone(each) for each in wanted]
    driver.assert_idle()
