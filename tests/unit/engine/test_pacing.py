"""How much of a prompt fits beside answers: learned from steps, bounded both ways."""

from __future__ import annotations

import pytest

from baton.engine.pacing import LEAST_TOKENS, TILE_ROWS, UNMEASURED_TOKENS, StepPace

TOKEN_SECONDS = 22e-6


def learned(target: float, row_seconds: float, *, most: int = 2048, steps: int = 40) -> StepPace:
    """A pace that has seen rows alone, and chunks beside them."""
    pace = StepPace(target, most)
    for _ in range(steps):
        pace.learn(32, 0, row_seconds)
        tokens = pace.chunk_tokens(32)
        pace.learn(32, tokens, row_seconds + tokens * TOKEN_SECONDS)
    return pace


@pytest.mark.parametrize(("target", "row_seconds"), [(0.020, 0.007), (0.012, 0.007), (0.050, 0.010)])
def test_a_chunk_beside_answers_fills_the_step_up_to_the_target(target: float, row_seconds: float) -> None:
    tokens = learned(target, row_seconds).chunk_tokens(32)
    assert row_seconds + tokens * TOKEN_SECONDS < 1.05 * target
    assert row_seconds + (tokens + TILE_ROWS) * TOKEN_SECONDS > 0.95 * target


@pytest.mark.parametrize("rows", [1, 12, 32, 100, 200])
def test_a_chunk_beside_answers_ends_where_a_tile_of_the_products_does(rows: int) -> None:
    assert (rows + learned(0.020, 0.007).chunk_tokens(rows)) % TILE_ROWS == 0


def test_less_than_a_tile_is_taken_as_it_comes() -> None:
    pace = learned(0.0085, 0.007)
    assert 60 < pace.chunk_tokens(8) < 76, "0.0015 s of tokens"


def test_without_answers_a_step_takes_all_it_has_room_for() -> None:
    assert learned(0.008, 0.007).chunk_tokens(0) == 2048


def test_without_a_target_a_step_takes_all_it_has_room_for() -> None:
    assert learned(0.0, 0.007).chunk_tokens(32) == 2048


def test_prompts_go_on_even_when_the_answers_alone_take_too_long() -> None:
    assert learned(0.008, 0.015).chunk_tokens(256) == LEAST_TOKENS


def test_the_first_chunk_beside_answers_is_a_careful_one() -> None:
    pace = StepPace(0.020, 8192)
    pace.learn(32, 0, 0.007)
    assert pace.chunk_tokens(32) == UNMEASURED_TOKENS
    assert pace.prompt_tokens_per_second(32) == 0.0


def test_a_target_bounds_how_fast_a_prompt_is_said_to_be_computed() -> None:
    pace = learned(0.020, 0.007)
    assert pace.prompt_tokens_per_second(0) == pytest.approx(1 / TOKEN_SECONDS, rel=0.05)
    chunk = pace.chunk_tokens(32)
    assert pace.prompt_tokens_per_second(32) == pytest.approx(chunk / (0.007 + chunk * TOKEN_SECONDS), rel=0.05)
    assert pace.prompt_tokens_per_second(32) < 0.7 / TOKEN_SECONDS


def test_an_estimate_follows_a_batch_that_grows() -> None:
    pace = learned(0.020, 0.005)
    before = pace.chunk_tokens(32)
    for _ in range(40):
        pace.learn(64, 0, 0.010)
    assert pace.chunk_tokens(64) < before


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    pace = StepPace(0.020, 512)
    pace.learn(1, 0, 0.0)
    pace.learn(0, 100, 0.0)
    assert (pace.row_seconds, pace.prompt_tokens_per_second(0)) == (0.0, 0.0)


def test_short_prompts_do_not_make_long_ones_look_dear() -> None:
    """A worker that has only seen its warm-up must not think that it computes nothing but slowly."""
    pace = StepPace(0.020, 2048)
    pace.learn(32, 0, 0.007)
    for _ in range(20):
        pace.learn(0, 16, 0.005)
    assert pace.prompt_tokens_per_second(32) == 0.0, "not measured"
    assert pace.chunk_tokens(32) == UNMEASURED_TOKENS


def test_one_step_that_was_held_up_changes_little() -> None:
    pace = learned(0.020, 0.007)
    before = pace.chunk_tokens(32)
    pace.learn(32, before, 3.0)
    assert pace.chunk_tokens(32) > before / 2


def test_chunks_that_have_become_short_find_their_way_back() -> None:
    pace = StepPace(0.020, 2048)
    pace.learn(32, 0, 0.007)
    pace.learn(32, 256, 0.300)  # the first one measured was held up
    assert pace.chunk_tokens(32) == LEAST_TOKENS
    for _ in range(200):
        tokens = pace.chunk_tokens(32)
        pace.learn(32, tokens, 0.007 + tokens * TOKEN_SECONDS)
    assert 480 <= pace.chunk_tokens(32) <= 0.013 / TOKEN_SECONDS, "four tiles are 512 rows"


def test_rows_that_were_held_up_once_are_not_taken_to_be_slow() -> None:
    """A process that was stopped for a while, say."""
    pace = learned(0.020, 0.007)
    before = pace.chunk_tokens(32)
    pace.learn(32, 0, 100.0)
    assert pace.row_seconds < 0.010
    assert pace.chunk_tokens(32) > before / 2


def test_rows_that_have_become_fast_are_noticed_though_prompts_never_end() -> None:
    pace = learned(0.020, 0.018)
    assert pace.chunk_tokens(256) < 100
    for _ in range(200):  # no step has rows alone
        tokens = pace.chunk_tokens(8)
        pace.learn(8, tokens, 0.004 + tokens * TOKEN_SECONDS)
    assert pace.chunk_tokens(8) > 400
