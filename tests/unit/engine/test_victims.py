"""Whose blocks are taken when there are not enough: a tenant that holds much gives before one that holds little."""

from __future__ import annotations

from baton.core.types import Tier
from tests.unit.engine.core_driver import Driver
from tests.unit.engine.core_modes import alone, steps_ahead
from tests.unit.engine.tenant_requests import bronze, of, reserve

__all__ = ["steps_ahead"]  # a fixture of every test here


def preemptions(driver: Driver, *keys: int) -> list[int]:
    return [driver.core._live[key].preemptions for key in keys]


def run_until_preempted(driver: Driver, times: int = 1) -> None:
    driver.run_until(lambda: driver.stats.preemptions >= times)


def test_a_tenants_only_request_keeps_its_blocks_while_others_of_its_tier_hold_more() -> None:
    """Though it came last: what is short is short because of the flood."""
    driver = Driver(20, growth_window=0)
    flood = [bronze("flood", 8, salt, 24) for salt in range(4)]
    quiet = bronze("quiet", 8, 50, 24)
    keys = reserve(driver, *flood, quiet)
    run_until_preempted(driver)
    while driver.core._live[keys[-1]].output_tokens < 20:
        driver.step()
        assert preemptions(driver, keys[-1]) == [0]
    driver.finish(*keys)
    assert [driver.outcomes[key].tokens for key in keys] == [alone(one) for one in (*flood, quiet)]
    driver.assert_idle()


def test_a_priority_saves_no_blocks_at_another_tenants_cost() -> None:
    driver = Driver(8, growth_window=0)
    keys = reserve(driver, bronze("low", 8, 0, 20, priority=-9), bronze("high", 8, 1, 20, priority=9))
    run_until_preempted(driver)
    assert preemptions(driver, *keys) == [0, 1], "of two tenants with one request each the younger request gives"
    driver.finish(*keys)
    driver.assert_idle()


def test_inside_a_tenant_the_lowest_priority_gives_first_and_then_the_youngest() -> None:
    driver = Driver(12, growth_window=0)
    keys = reserve(driver, bronze("a", 8, 0, 20, priority=-1), bronze("a", 8, 1, 20), bronze("a", 8, 2, 20))
    run_until_preempted(driver)
    assert preemptions(driver, *keys) == [1, 0, 0]
    run_until_preempted(driver, 2)
    assert preemptions(driver, *keys) == [1, 0, 1]
    driver.finish(*keys)
    driver.assert_idle()


def test_what_a_lower_tier_borrowed_comes_back_from_the_tenant_that_holds_most_of_it() -> None:
    driver = Driver(256, max_running=8)
    flood = reserve(driver, *(bronze("flood", 8, salt, 60) for salt in range(6)))
    quiet = reserve(driver, bronze("q1", 8, 10, 60), bronze("q2", 8, 11, 60))
    driver.step()
    driver.step()
    golds = reserve(driver, *(of("g", Tier.GOLD, 8, 20 + salt, 60) for salt in range(4)))
    for _ in range(3):
        driver.step()
    assert preemptions(driver, *quiet) == [0, 0]
    assert preemptions(driver, *flood) == [0, 0, 1, 1, 1, 1]
    driver.finish(*flood, *quiet, *golds)
    driver.assert_idle()


def test_blocks_that_a_tenants_other_requests_hold_too_are_none_that_it_would_give() -> None:
    """Two tenants with two requests each: those of one share most of their blocks, so it holds less in all."""
    driver = Driver(26, growth_window=0)
    driver.answer(bronze("shares", 33, 0, 1))
    sharing = reserve(driver, *(bronze("shares", 33, 0, 16) for _ in range(2)))
    apart = reserve(driver, *(bronze("apart", 25, salt, 16) for salt in (7, 8)))
    run_until_preempted(driver)
    assert preemptions(driver, *apart, *sharing) == [0, 0, 0, 1], "8 blocks would be left to it, 7 to the other"
    driver.finish(*sharing, *apart)
    driver.assert_idle()
