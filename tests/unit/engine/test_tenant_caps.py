"""How much one tenant may have: KV blocks, by its record's cap or the worker's, and places of the bounded queue."""

from __future__ import annotations

import pytest

from baton.core.errors import Expired, InvalidRequest, Overloaded
from baton.core.types import Tier, TokenRequest
from tests.unit.engine.core_driver import Driver, prompt, request
from tests.unit.engine.core_modes import alone, steps_ahead
from tests.unit.engine.tenant_requests import bronze, of, reserve

__all__ = ["steps_ahead"]  # a fixture of every test here

# --- KV blocks -------------------------------------------------------------------------------------------------------


def test_a_tenant_waits_at_its_cap_while_others_pass_and_is_told_the_limit_when_it_expires() -> None:
    driver = Driver(20, tenant_block_share=0.5, growth_window=0)
    first = driver.reserve(bronze("a", 24, 0, 4))
    driver.step()
    second = driver.reserve(bronze("a", 24, 1, 4, timeout=5.0))
    other = driver.reserve(bronze("b", 24, 2, 4))
    driver.step()
    assert [driver.outcomes[key].cached_tokens is None for key in (first, second, other)] == [False, True, False]
    driver.clock.advance(5.0)
    driver.step()
    error = driver.outcomes[second].error
    assert isinstance(error, Expired)
    assert "engine.tenant_block_share: its tenant holds 6 KV blocks, and may hold 10" in error.message
    driver.release(first)
    driver.release(other)
    driver.assert_idle()


def test_the_lower_of_the_tenants_record_and_the_workers_setting_is_its_cap(steps_ahead: int) -> None:
    """And it is the newest request's: a record may have been changed."""
    for recorded, share, told in (
        (8, 1.0, "max_kv_blocks: its tenant holds 7 KV blocks, and may hold 8"),
        (19, 0.4, "engine.tenant_block_share: its tenant holds 7 KV blocks, and may hold 8"),
    ):
        driver = Driver(20, tenant_block_share=share, growth_window=0)
        first = driver.reserve(bronze("a", 28, 0, 4))
        driver.step()
        second = driver.reserve(bronze("a", 8, 1, 4, timeout=5.0, tenant_max_blocks=recorded))
        other = driver.reserve(bronze("b", 8, 2, 4))
        driver.step()
        assert [driver.outcomes[key].cached_tokens is None for key in (first, second, other)] == [False, True, False]
        driver.clock.advance(5.0)
        driver.step()
        error = driver.outcomes[second].error
        assert error is not None and told in error.message
        for key in (first, other):
            driver.release(key)
        driver.assert_idle()


def test_a_cap_that_the_pool_is_below_of_is_none() -> None:
    """Else a large request of the tenant would be passed over by small ones of others as long as they come."""
    driver = Driver(20, growth_window=0)
    held = [driver.reserve(bronze("a", 24, 0, 4, tenant_max_blocks=1000)), driver.reserve(bronze("b", 28, 1, 4))]
    driver.step()
    large = driver.reserve(bronze("a", 60, 2, 4, tenant_max_blocks=1000))
    small = driver.reserve(bronze("b", 8, 3, 4))
    driver.step()
    keys = [*held, large, small]
    assert [driver.outcomes[key].cached_tokens is None for key in keys] == [False, False, True, True]
    for key in keys:
        driver.release(key)
    driver.assert_idle()


def test_one_request_alone_always_fits_whatever_the_cap() -> None:
    driver = Driver(8, tenant_block_share=0.1, growth_window=0)
    assert len(driver.answer(bronze("a", 5, 0, 27)).tokens) == 27
    assert driver.stats.preemptions == 0
    driver.assert_idle()


def test_a_tenant_that_grows_past_its_cap_gives_up_its_own_youngest_and_nobody_elses() -> None:
    driver = Driver(64, tenant_block_share=0.125, growth_window=0)
    others = [bronze("b", 8, 9, 20)]
    own = [bronze("a", 8, salt, 20) for salt in range(3)]
    keys = reserve(driver, *own, *others)
    most = 0
    while not all(driver.outcomes[key].is_over for key in keys):
        driver.step()
        live = [s for s in driver.core._live.values() if s.request.tenant == "a"]
        held = {block for sequence in live for block in sequence.blocks}
        most = max(most, len(held) if len(live) > 1 else 0)
    assert most == 8
    assert driver.stats.preemptions > 0
    assert [driver.outcomes[key].tokens for key in keys] == [alone(one) for one in (*own, *others)]
    driver.assert_idle()


def test_shared_prefix_blocks_count_once_towards_the_cap() -> None:
    driver = Driver(40, tenant_block_share=0.3, growth_window=0)
    driver.answer(bronze("a", 33, 0, 1))
    keys = [driver.reserve(bronze("a", 33, 0, 1)) for _ in range(4)]
    driver.step()
    assert all(driver.outcomes[key].cached_tokens == 32 for key in keys)  # 8 shared blocks and one each: 12 of 12
    last = driver.reserve(bronze("a", 33, 0, 1))
    driver.step()
    assert driver.outcomes[last].cached_tokens is None
    for key in (*keys, last):
        driver.release(key)
    driver.assert_idle()


def test_a_cap_that_is_none_is_refused_by_name() -> None:
    driver = Driver(20)
    key = driver.reserve(bronze("a", 8, 0, tenant_max_blocks=0))
    driver.step()
    error = driver.outcomes[key].error
    assert isinstance(error, InvalidRequest) and error.field == "tenant_max_blocks" and "got 0" in error.message


def test_what_each_tier_has_is_told() -> None:
    driver = Driver(20, growth_window=0)
    keys = [driver.reserve(one) for one in (of("g", Tier.GOLD, 15, 0, 1), bronze("a", 31, 1, 1), bronze("b", 63, 2, 1))]
    driver.step()
    loads = [(load.tenants, load.waiting, load.running, load.blocks) for load in driver.stats.tiers]
    assert [load.backlog_tokens for load in driver.stats.tiers] == [0, 0], "held, not computed yet: KV may come"
    assert [load.tier for load in driver.stats.tiers] == [Tier.GOLD, Tier.BRONZE]
    assert loads == [(1, 0, 1, 4), (2, 1, 1, 8)]
    for key in keys:
        driver.release(key)
    assert len(driver.stats.tiers) == 2
    assert all((load.tenants, load.waiting, load.running, load.blocks) == (0, 0, 0, 0) for load in driver.stats.tiers)
    driver.assert_idle()


# --- the bounded queue ------------------------------------------------------------------------------------------------


def full(driver: Driver, *wanted: TokenRequest) -> list[int]:
    """The keys of ``wanted``, which fill the queue behind a request that holds everything."""
    driver.reserve(request(prompt(8, 99), 8, tenant="holder", tier=Tier.GOLD))
    driver.step()
    keys = [driver.reserve(one) for one in wanted]
    driver.step()
    assert driver.stats.waiting == len(wanted)
    return keys


@pytest.mark.parametrize(
    "newcomer",
    [
        pytest.param(of("g", Tier.GOLD, 8, 50), id="of a higher tier"),
        pytest.param(bronze("other", 8, 50), id="of a tenant with fewer"),
    ],
)
def test_a_full_queue_takes_a_newcomer_for_the_last_of_the_tenant_with_most(newcomer: TokenRequest) -> None:
    driver = Driver(4, max_waiting=4)
    keys = full(driver, *(bronze("flood", 8, salt) for salt in range(4)))
    key = driver.reserve(newcomer)
    driver.step()
    assert driver.outcomes[key].error is None
    errors = [driver.outcomes[each].error for each in keys]
    assert errors[:3] == [None] * 3
    assert isinstance(errors[3], Overloaded)
    assert "better claim" in errors[3].message
    assert driver.stats.waiting == 4


def test_a_full_queue_refuses_a_newcomer_of_a_lower_tier_or_with_as_many() -> None:
    driver = Driver(4, max_waiting=4)
    full(driver, *(of("g", Tier.GOLD, 8, salt) for salt in range(2)), *(bronze("b", 8, 8 + salt) for salt in range(2)))
    for newcomer in (bronze("c", 8, 50), bronze("b", 8, 51)):
        key = driver.reserve(newcomer)
        driver.step()
        if newcomer.tenant == "b":
            assert isinstance(driver.outcomes[key].error, Overloaded)
    assert driver.stats.waiting == 4


def test_a_tier_below_its_share_of_a_full_queue_gets_a_place_from_one_above_its_own() -> None:
    driver = Driver(4, max_waiting=10)
    keys = full(driver, *(of("g", Tier.GOLD, 8, salt) for salt in range(10)))
    low = driver.reserve(bronze("b", 8, 50))
    driver.step()
    assert driver.outcomes[low].error is None
    assert isinstance(driver.outcomes[keys[-1]].error, Overloaded)
    second = driver.reserve(bronze("c", 8, 51))
    driver.step()
    assert isinstance(driver.outcomes[second].error, Overloaded), "one of ten is its share"
