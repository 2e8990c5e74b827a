from __future__ import annotations

from services.kvtransfer.economy import FetchEconomy


def economy() -> FetchEconomy:
    return FetchEconomy(bytes_per_second=1e6, tokens_per_second=100.0, min_tokens=32)


def test_fetching_pays_when_the_bytes_come_sooner_than_the_tokens() -> None:
    assert economy().pays(100, 999_000)  # 1 s of computing
    assert not economy().pays(100, 1_001_000)


def test_a_short_prefix_is_never_worth_a_call() -> None:
    assert not economy().pays(31, 1)
    assert economy().pays(32, 1)


def test_both_rates_follow_what_is_observed() -> None:
    learned = economy()
    for _ in range(50):
        learned.moved(10_000_000, 100.0)
    assert not learned.pays(100, 999_000)
    for _ in range(50):
        learned.computed(1000, 1000.0)
    assert learned.pays(100, 999_000)


def test_observations_that_say_little_change_nothing() -> None:
    learned = economy()
    learned.moved(100, 100.0)
    learned.moved(10_000_000, 0.0)
    learned.computed(1, 100.0)
    learned.computed(1000, 0.0)
    learned.computed(1000, 0.0001)
    assert (learned.bytes_per_second, learned.tokens_per_second) == (1e6, 100.0)


def test_the_first_observation_replaces_the_guess_and_later_ones_move_it() -> None:
    learned = economy()
    learned.computed(1000, 0.1)
    assert learned.tokens_per_second == 10_000.0
    learned.computed(1000, 0.2)
    assert learned.tokens_per_second == 9_000.0
    learned.moved(1_000_000, 0.001)
    assert learned.bytes_per_second == 1e9
