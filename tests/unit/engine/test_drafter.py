"""Prompt lookup: what followed the last tokens before is what they are expected to go on with."""

from __future__ import annotations

import random

import pytest

from baton.engine import drafter as drafter_module
from baton.engine.drafter import NGRAM_SIZES, NgramDrafter, NoDrafts, Query


def propose(context: list[int], limit: int = 4) -> tuple[int, ...]:
    return NgramDrafter().propose([Query(1, context, limit)])[0]


def test_what_followed_before_is_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == (4, 5, 6, 9)


def test_the_longest_ngram_decides() -> None:
    assert propose([1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 1, 2, 3, 4], 1) == (50,)


def test_of_equal_ngrams_the_latest_decides() -> None:
    assert propose([2, 3, 50, 9, 2, 3, 60, 9, 8, 2, 3], 1) == (60,)


def test_a_repetition_goes_on_past_the_end_of_the_context() -> None:
    assert propose([1, 2, 3, 1, 2, 3, 1, 2], 7) == (3, 1, 2, 3, 1, 2, 3)
    assert propose([7, 7, 7], 5) == (7,) * 5


@pytest.mark.parametrize("context", [[], [1], [1, 2], [1, 2, 3], [1, 1], [5, 6, 5]])
def test_without_a_repeated_pair_there_is_no_draft(context: list[int]) -> None:
    assert propose(context) == ()
    assert not NgramDrafter().expects(1, context)


def test_a_growing_context_is_looked_up_as_a_new_one() -> None:
    chance = random.Random(5)
    context = [chance.randrange(6) for _ in range(3)]
    grown = NgramDrafter()
    for _ in range(200):
        assert grown.propose([Query(1, context, 5)])[0] == propose(context, 5)
        context += [chance.randrange(6) for _ in range(chance.randrange(1, 9))]


def test_lookup_agrees_with_a_search_of_the_whole_context() -> None:
    chance = random.Random(6)
    for _ in range(200):
        context = [chance.randrange(8) for _ in range(chance.randrange(2, 60))]
        assert propose(context, 1) == searched(context)


def searched(context: list[int]) -> tuple[int, ...]:
    for size in NGRAM_SIZES:
        for end in range(len(context) - 1, size - 1, -1):
            if len(context) > size and context[end - size : end] == context[-size:]:
                return (context[end],)
    return ()


def test_a_long_context_is_indexed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_module, "INDEXED_AT_ONCE", 10)
    context = [*range(100, 125), 1, 2, 3, *range(200, 210), 1, 2]
    drafter = NgramDrafter()
    answers = [drafter.propose([Query(1, context, 1)])[0] for _ in range(4)]
    assert answers == [(), (), (3,), (3,)]


def test_what_is_forgotten_is_looked_up_anew() -> None:
    drafter = NgramDrafter()
    assert drafter.expects(1, [1, 2, 3, 1, 2])
    drafter.forget(1)
    assert not drafter.expects(1, [5, 6, 7, 1, 2])


def test_no_drafts_are_none() -> None:
    assert NoDrafts().propose([Query(1, [1, 1, 1], 3), Query(2, [2, 2, 2], 3)]) == [(), ()]
    assert not NoDrafts().expects(1, [1, 1, 1])
