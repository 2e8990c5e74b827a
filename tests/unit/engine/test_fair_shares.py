"""Who goes first when tenants and tiers compete for one engine: places, blocks and the prompt tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.clock import ManualClock
from baton.core.types import Tier
from baton.engine.runner import Part
from tests.unit.engine.core_driver import Driver
from tests.unit.engine.core_modes import alone, steps_ahead
from tests.unit.engine.tenant_requests import bronze, of, reserve

__all__ = ["steps_ahead"]  # a fixture of every test here

NOTHING_RESERVED = ("gold=1:0:1000", "silver=1:0:1000", "bronze=1:0:1000")


def admission_order(driver: Driver, keys: Sequence[int]) -> list[int]:
    """Steps until all are over; the keys in the order in which they were admitted."""
    order: list[int] = []
    for _ in range(2000):
        driver.step()
        order += [key for key in keys if driver.outcomes[key].cached_tokens is not None and key not in order]
        if all(driver.outcomes[key].is_over for key in keys):
            return order
    raise AssertionError("the engine does not come to an end")


# --- tenants of one tier ----------------------------------------------------------------------------------------------


def test_a_tenant_with_many_requests_waits_behind_one_with_few() -> None:
    driver = Driver(64, max_running=1)
    flood = reserve(driver, *(bronze("flood", 8, salt) for salt in range(4)))
    other = reserve(driver, *(bronze("other", 8, 10 + salt) for salt in range(2)))
    order = admission_order(driver, flood + other)
    assert order == [flood[0], other[0], flood[1], other[1], flood[2], flood[3]]
    driver.assert_idle()


def test_places_that_are_free_at_one_moment_are_divided_among_those_who_wait() -> None:
    """What was admitted and is not computed yet counts."""
    driver = Driver(64, max_running=4)
    holder = reserve(driver, *(bronze("x", 8, 90 + salt, 2) for salt in range(4)))
    driver.step()
    flood = reserve(driver, *(bronze("flood", 8, salt, 30) for salt in range(4)))
    other = reserve(driver, *(bronze("other", 8, 10 + salt, 30) for salt in range(4)))
    driver.run_until(lambda: sum(driver.outcomes[key].cached_tokens is not None for key in flood + other) == 4)
    assert [sum(driver.outcomes[k].cached_tokens is not None for k in keys) for keys in (flood, other)] == [2, 2]
    driver.finish(*holder, *flood, *other)
    driver.assert_idle()


def test_computed_prompt_tokens_and_drawn_tokens_are_charged_with_their_weights_and_hits_are_not() -> None:
    driver = Driver(64, prompt_token_weight=3.0, output_token_weight=5.0)
    first, again = bronze("a", 9, 0, 4), bronze("a", 9, 0, 4)
    stay = driver.reserve(bronze("a", 4, 7, 4))  # never computed: keeps the tenant's share from leaving
    driver.step()
    share = driver.core._live[stay].share
    driver.answer(first)
    assert share.counter == 3.0 * 9 + 5.0 * 4
    driver.answer(again)
    assert share.counter == 2 * (3.0 * 9 + 5.0 * 4) - 3.0 * 8
    driver.release(stay)
    driver.assert_idle()


def test_blocks_that_were_fetched_instead_of_computed_are_charged_to_nobody() -> None:
    driver = Driver(64)
    fetched = bronze("a", 9, 0, 1)
    source = driver.prefill(fetched)
    driver.run_until(lambda: driver.outcomes[source].first is not None)
    payload = driver.read(source, 0, 2)
    driver.release(source)
    other = Driver(64)
    key = other.reserve(fetched)
    other.step()
    share = other.core._live[key].share
    assert isinstance(payload, bytes) and other.write(key, 0, payload) is None
    assert other.import_blocks(key, 2) is None
    other.decode(key)
    other.finish(key)
    assert share.counter == 1 * 1.0 + 1 * 2.0, "of nine prompt tokens eight were imported"


def test_what_is_recomputed_after_a_preemption_is_charged_once() -> None:
    driver = Driver(8, growth_window=0)
    stay = driver.reserve(bronze("a", 1, 7, 1))
    driver.step()
    share = driver.core._live[stay].share
    keys = reserve(driver, *(bronze("a", 9, salt, 12) for salt in range(2)))
    driver.finish(*keys)
    assert driver.stats.preemptions > 0
    assert share.counter == 2 * (9 * 1.0 + 12 * 2.0)
    driver.release(stay)
    driver.assert_idle()


def test_an_idle_tenant_saves_nothing_up() -> None:
    """Who comes late to a busy engine shares it from then on, and does not get what it could have had before."""
    driver = Driver(256, max_running=1)
    busy = reserve(driver, *(bronze("busy", 8, salt) for salt in range(10)))
    driver.run_until(lambda: driver.outcomes[busy[4]].cached_tokens is not None)
    late = reserve(driver, *(bronze("late", 8, 20 + salt) for salt in range(4)))
    order = admission_order(driver, busy + late)[5:]
    assert sorted(order[:2]) == sorted([busy[5], late[0]])
    assert {late[1], late[2]} <= set(order[:7])
    assert sum(key in late for key in order[:4]) == 2
    driver.assert_idle()


def test_priority_orders_a_tenants_own_requests_and_nobody_elses() -> None:
    driver = Driver(64, max_running=1)
    holder = reserve(driver, bronze("x", 4, 99, 2))
    driver.step()
    low, high = reserve(driver, bronze("a", 8, 1), bronze("a", 8, 2, priority=9))
    (other,) = reserve(driver, bronze("b", 8, 3, priority=-9))
    assert admission_order(driver, [*holder, low, high, other])[1:] == [high, other, low]


def test_tenants_take_turns_with_the_prompt_tokens_of_a_step() -> None:
    steps: list[list[int]] = []
    driver = Driver(256, max_step_tokens=8, on_step=lambda parts: steps.append([p.key for p in parts]))
    flood = reserve(driver, *(bronze("flood", 24, salt, 1) for salt in range(3)))
    driver.step()
    (other,) = reserve(driver, bronze("other", 24, 9, 1))
    driver.finish(*flood, other)
    first = next(i for i, keys in enumerate(steps) if other in keys)
    assert first <= 2
    assert sum(keys == [other] for keys in steps[first : first + 6]) == 3


# --- tiers ------------------------------------------------------------------------------------------------------------


def test_a_request_within_its_tiers_reserved_share_gets_the_place_of_a_lower_one(steps_ahead: int) -> None:
    """At once where nothing is in flight; else when the step in flight, which may touch the blocks, has finished."""
    driver = Driver(20, growth_window=0)
    low = [bronze("b", 15, salt, 24) for salt in range(4)]
    keys = reserve(driver, *low)
    driver.run_until(lambda: all(len(driver.outcomes[key].tokens) >= 2 for key in keys))
    assert driver.stats.free_blocks + driver.stats.cached_blocks < 9
    wanted = of("g", Tier.GOLD, 33, 50, 3)
    (gold,) = reserve(driver, wanted)
    for _ in range(1 + steps_ahead):
        assert driver.outcomes[gold].cached_tokens is None
        driver.step()
    assert driver.outcomes[gold].cached_tokens is not None
    assert driver.stats.preemptions >= 1
    driver.finish(*keys, gold)
    assert [driver.outcomes[key].tokens for key in (*keys, gold)] == [alone(one) for one in (*low, wanted)]
    driver.assert_idle()


def test_a_place_is_taken_back_only_from_the_youngest_of_the_lowest_tier_and_from_no_reserved_share() -> None:
    driver = Driver(256, max_running=10)
    bronzes = reserve(driver, *(bronze("b", 8, salt, 60) for salt in range(4)))
    silvers = reserve(driver, *(of("s", Tier.SILVER, 8, 10 + salt, 60) for salt in range(6)))
    driver.step()
    driver.step()
    golds = reserve(driver, *(of("g", Tier.GOLD, 8, 20 + salt, 60) for salt in range(5)))
    for _ in range(3):
        driver.step()
    waiting = {sequence.key for sequence in driver.core._scheduler._waiting}
    assert waiting == {*bronzes[1:], *silvers[4:]}, "bronze keeps its one place of ten, then silver gives back"
    driver.finish(*bronzes, *silvers, *golds)
    driver.assert_idle()


def test_nobody_loses_its_blocks_to_a_lower_tier() -> None:
    driver = Driver(8, growth_window=0)
    low = bronze("b", 8, 1, 20)
    keys = reserve(driver, of("g", Tier.GOLD, 8, 0, 20), low)
    driver.step()
    driver.run_until(lambda: driver.stats.preemptions > 0)
    assert [sequence.key for sequence in driver.core._scheduler._waiting] == [keys[1]]
    driver.finish(*keys)
    assert driver.outcomes[keys[1]].tokens == alone(low)


def test_reservations_that_cannot_be_preempted_leave_a_higher_tier_what_is_reserved_for_it() -> None:
    """Held blocks wait for another worker's KV, so nobody can take them back."""
    driver = Driver(256, max_running=10)
    (gold,) = reserve(driver, of("g", Tier.GOLD, 8, 0, 200))
    driver.step()
    held = [driver.reserve(bronze("b", 8, 1 + salt)) for salt in range(9)]
    driver.step()
    assert sum(driver.outcomes[key].cached_tokens is not None for key in held) == 5
    more = reserve(driver, *(of("g", Tier.GOLD, 8, 20 + salt) for salt in range(4)))
    driver.step()
    assert all(driver.outcomes[key].cached_tokens is not None for key in more)
    for key in (gold, *held, *more):
        driver.release(key)
    driver.assert_idle()


def test_a_share_that_nobody_uses_is_lent_whole() -> None:
    driver = Driver(256, max_running=10, reserve_idle_seconds=5.0)
    driver.answer(of("g", Tier.GOLD, 8, 0))
    held = [driver.reserve(bronze("b", 8, 1 + salt)) for salt in range(10)]
    driver.step()
    assert sum(driver.outcomes[key].cached_tokens is not None for key in held) == 5
    driver.clock.advance(5.0)
    driver.reserve(bronze("b", 8, 50))
    driver.step()
    assert sum(driver.outcomes[key].cached_tokens is not None for key in held) == 10


def test_tiers_share_by_weight_what_is_not_reserved() -> None:
    driver = Driver(4096, max_running=1, tiers=("gold=3:0:1000", "silver=1:0:1000", "bronze=1:0:1000"))
    golds = reserve(driver, *(of("g", Tier.GOLD, 8, salt) for salt in range(30)))
    bronzes = reserve(driver, *(bronze("b", 8, 40 + salt) for salt in range(30)))
    order = admission_order(driver, golds + bronzes)
    assert 14 <= sum(key in golds for key in order[:20]) <= 16


def test_prompt_tokens_of_a_step_go_to_the_tier_they_are_reserved_for() -> None:
    steps: list[dict[int, int]] = []

    def watch(parts: Sequence[Part]) -> None:
        steps.append({part.key: part.end - part.start for part in parts})

    tiers = ("gold=1:0.5:1000", "silver=1:0.2:1000", "bronze=1:0.1:1000")
    driver = Driver(256, max_step_tokens=16, on_step=watch, tiers=tiers)
    low = reserve(driver, *(bronze("b", 64, salt, 1) for salt in range(3)))
    driver.step()
    (gold,) = reserve(driver, of("g", Tier.GOLD, 48, 50, 1))
    driver.finish(*low, gold)
    first = next(i for i, step in enumerate(steps) if gold in step)
    assert first <= 1
    assert [step.get(gold) for step in steps[first : first + 3]] == [16, 16, 16]


def test_of_the_few_prompt_tokens_beside_answers_each_tier_gets_what_is_reserved_for_it() -> None:
    """With a TPOT target a step has room for a fraction of its tokens: shares are of that room."""
    clock: list[ManualClock] = []
    computed = dict.fromkeys(Tier, 0)

    def watch(parts: Sequence[Part]) -> None:
        tokens = 0
        for part in parts:
            if part.end - part.start > 1:
                tokens += part.end - part.start
                computed[driver.core._live[part.key].request.tier] += part.end - part.start
        clock[0].advance(0.005 + 0.0001 * tokens)

    tiers = ("gold=8:0.5:1000", "silver=3:0.2:1000", "bronze=1:0.1:1000")
    driver = Driver(4096, max_step_tokens=512, on_step=watch, tiers=tiers, tpot_target_ms=20)
    clock.append(driver.clock)
    (answering,) = reserve(driver, bronze("answers", 2, 99, 4000))
    for _ in range(20):
        driver.step()
    for salt in range(60):
        reserve(driver, *(of(tier.value, tier, 800, salt + 100 * index, 1) for index, tier in enumerate(Tier)))
    for _ in range(250):
        driver.step()  # until what was saved up is used up
    computed.update(dict.fromkeys(Tier, 0))
    for _ in range(150):
        driver.step()
    assert driver.stats.waiting > 0
    total = sum(computed.values())
    assert total < 150 * 256, "paced: far from what steps have room for"
    assert computed[Tier.BRONZE] >= 0.09 * total
    assert computed[Tier.SILVER] >= 0.18 * total
    assert computed[Tier.GOLD] >= 0.45 * total
    driver.release(answering)


# --- starvation -------------------------------------------------------------------------------------------------------


def test_the_oldest_request_of_a_tenant_goes_first_once_it_has_waited_past_its_bound() -> None:
    tiers = ("gold=1000:1:1000", "silver=1:0:1000", "bronze=1:0:30")
    driver = Driver(256, max_running=1, tiers=tiers)
    reserve(driver, *(of("g", Tier.GOLD, 8, salt) for salt in range(40)))
    low, later = reserve(driver, bronze("b", 8, 60), bronze("b", 8, 61))
    driver.clock.advance(29.0)
    for _ in range(30):
        driver.step()
    assert driver.outcomes[low].cached_tokens is None
    driver.clock.advance(1.0)
    driver.run_until(lambda: driver.outcomes[low].is_over)
    for _ in range(30):
        driver.step()
    assert driver.outcomes[later].cached_tokens is None, "one a tenant and bound: its own flood is no starvation"
    driver.clock.advance(30.0)
    driver.run_until(lambda: driver.outcomes[later].is_over)


def test_a_large_request_past_its_bound_is_not_overtaken_for_ever_by_a_reserved_share() -> None:
    driver = Driver(24, growth_window=0, tiers=("gold=1000:0.6:1000", "silver=1:0:1000", "bronze=1:0:10"))
    golds = iter([of("g", Tier.GOLD, 15, salt, 10) for salt in range(30)])
    keys = reserve(driver, next(golds))
    driver.step()
    (large,) = reserve(driver, bronze("b", 90, 90, 2))
    for _ in range(2):
        assert driver.outcomes[large].cached_tokens is None, "two at a time, never ending together: it never fits"
        driver.clock.advance(10.0)
        for step in range(30):
            keys += reserve(driver, next(golds)) if step % 5 == 0 else []
            driver.step()
    assert driver.outcomes[large].cached_tokens is not None
    driver.finish(large, *keys)
    driver.assert_idle()


def test_the_engine_wakes_up_when_somebody_has_waited_too_long() -> None:
    driver = Driver(4)
    holder = driver.reserve(bronze("a", 8, 0))
    driver.step()
    waiting = driver.reserve(bronze("b", 8, 1))
    driver.step()
    assert driver.core.idle_seconds() == 30.0
    driver.release(holder)
    driver.release(waiting)
    driver.assert_idle()


def test_without_reserved_shares_and_with_one_tenant_nothing_has_changed() -> None:
    driver = Driver(64, max_running=1, tiers=NOTHING_RESERVED)
    keys = reserve(driver, *(bronze("a", 8, salt, priority=salt % 2) for salt in range(6)))
    assert admission_order(driver, keys) == [keys[1], keys[3], keys[5], keys[0], keys[2], keys[4]]
