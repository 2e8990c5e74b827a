from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.types import FinishReason, Sampling, StopRules, Tier, TokenRequest, Usage
from baton.engine.fake import EOS
from tests.unit.engine.core_driver import Driver, prompt, request
from tests.unit.engine.core_modes import SAMPLED, alone, steps_ahead

__all__ = ["steps_ahead"]  # a fixture of every test here


# --- prefix cache, chunks, batches, preemption ------------------------------------------------------------------------


def test_every_prefix_hit_length_gives_the_same_tokens() -> None:
    wanted = request(prompt(23), sampling=SAMPLED)
    expected = alone(wanted)
    for hit in range(len(wanted.prompt) + 1):
        driver = Driver(64)
        if hit:
            driver.answer(request(wanted.prompt[:hit], 1))
        outcome = driver.answer(wanted)
        assert outcome.tokens == expected
        assert outcome.cached_tokens == min(hit, 22) // 4 * 4
        assert outcome.chunks[0].usage == Usage(23, outcome.cached_tokens or 0, 1)
        driver.assert_idle()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_prefix_hit_is_never_the_whole_context(length: int) -> None:
    driver = Driver(64)
    wanted = request(prompt(length))
    expected = driver.answer(wanted).tokens
    again = driver.answer(wanted)
    assert again.cached_tokens == (length - 1) // 4 * 4
    assert again.tokens == expected


def test_every_chunk_size_gives_the_same_tokens() -> None:
    wanted = request(prompt(21), sampling=SAMPLED, prompt_logprobs=2, logprobs=1)
    expected = Driver(64).answer(wanted).chunks
    for size in range(1, 23):
        driver = Driver(64, max_step_tokens=size)
        assert driver.answer(wanted).chunks == expected
        driver.assert_idle()


@st.composite
def mixes(draw: st.DrawFn) -> list[TokenRequest]:
    """Requests that share prefixes, of any length, priority and way of drawing."""
    wanted: list[TokenRequest] = []
    for _ in range(draw(st.integers(2, 8))):
        tokens = (*prompt(draw(st.integers(0, 12))), *prompt(draw(st.integers(1, 8)), draw(st.integers(0, 2))))
        generated = prompt(draw(st.integers(0, 2)), 5)
        wanted.append(
            request(
                tokens,
                len(generated) + draw(st.integers(1, 16)),
                generated=generated,
                priority=draw(st.integers(0, 2)),
                tenant=draw(st.sampled_from("ab")),
                tier=draw(st.sampled_from(Tier)),
                sampling=draw(st.sampled_from([Sampling(), SAMPLED])),
                prompt_logprobs=draw(st.sampled_from([None, 1])),
            )
        )
    return wanted


@settings(max_examples=60, deadline=None)
@given(
    mixes(),
    st.integers(10, 24),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(0, 16),
    st.lists(st.integers(0, 3)),
    st.sampled_from([1.0, 0.5, 0.2]),
)
def test_any_mix_under_any_pressure_gives_the_tokens_of_each_alone(
    wanted: list[TokenRequest],
    blocks: int,
    step_tokens: int,
    running: int,
    growth: int,
    pauses: list[int],
    tenant_share: float,
) -> None:
    driver = Driver(
        blocks,
        max_step_tokens=step_tokens,
        max_running=running,
        growth_window=growth,
        tenant_block_share=tenant_share,
    )
    keys: list[int] = []
    for i, one in enumerate(wanted):
        key = driver.reserve(one)
        driver.decode_when_admitted(key)
        keys.append(key)
        for _ in range(pauses[i] if i < len(pauses) else 0):
            driver.step()
    driver.finish(*keys)
    for key, one in zip(keys, wanted, strict=True):
        outcome, expected = driver.outcomes[key], Driver(512).answer(one)
        assert outcome.error is None
        assert outcome.tokens == expected.tokens
        assert outcome.chunks[0].prompt_logprobs == expected.chunks[0].prompt_logprobs
        assert outcome.chunks[0].usage is not None
        assert outcome.chunks[-1].usage == dataclasses.replace(
            outcome.chunks[0].usage, completion_tokens=len(one.generated) + len(outcome.tokens)
        )
    driver.assert_idle()


def test_preempts_the_youngest_of_the_lowest_priority_and_delivers_no_token_twice(steps_ahead: int) -> None:
    """The victim's blocks return when the step in flight has finished: until then, whoever needs one has to wait."""
    driver = Driver(10, growth_window=0)
    wanted = [request(prompt(8, i), 24, priority=p) for i, p in enumerate((0, 1, 0))]
    keys = [driver.reserve(one) for one in wanted]
    driver.step()
    for key in keys:
        driver.decode(key)
    driver.run_until(lambda: driver.stats.preemptions > 0)
    lengths = [len(driver.outcomes[key].tokens) for key in keys]
    driver.run_until(lambda: len(driver.outcomes[keys[0]].tokens) > lengths[0])
    gained = [len(driver.outcomes[key].tokens) - n for key, n in zip(keys, lengths, strict=True)]
    assert gained == [1, 1 + steps_ahead, 0]
    driver.finish(*keys)
    assert [driver.outcomes[key].tokens for key in keys] == [alone(one) for one in wanted]
    driver.assert_idle()


def test_a_prefill_in_progress_keeps_its_blocks_when_others_run_short() -> None:
    driver = Driver(10, growth_window=0, max_step_tokens=3)
    answering = driver.reserve(request(prompt(4), 30, priority=1))
    driver.step()
    driver.decode(answering)
    prefilling = driver.prefill(request(prompt(28, 1)))
    driver.run_until(lambda: driver.stats.preemptions > 0)
    assert driver.outcomes[prefilling].first is None
    assert driver.stats.held_blocks == 7
    driver.first_token(prefilling)
    driver.release(prefilling)
    assert driver.finish(answering).tokens == alone(request(prompt(4), 30))
    driver.assert_idle()


def test_a_lone_request_that_fills_the_pool_ends() -> None:
    driver = Driver(8, growth_window=0)
    outcome = driver.answer(request(prompt(5), 27))
    assert len(outcome.tokens) == 27
    assert driver.stats.preemptions == 0


def test_decode_rows_go_before_prefill_chunks_and_the_step_is_bounded() -> None:
    sizes: list[list[int]] = []
    driver = Driver(64, max_step_tokens=6, on_step=lambda parts: sizes.append([p.end - p.start for p in parts]))
    first, second = driver.reserve(request(prompt(4), 20)), driver.reserve(request(prompt(14, 1), 20))
    driver.step()
    driver.decode(first)
    driver.step()
    driver.decode(second)
    driver.finish(first, second)
    assert sizes[:5] == [[4], [1, 5], [1, 5], [1, 4], [1, 1]]


def test_counts_what_it_computed_and_what_it_found() -> None:
    driver = Driver(64)
    driver.answer(request(prompt(10), 3))
    driver.answer(request(prompt(10), 3))
    stats = driver.stats
    assert (stats.prompt_tokens_computed, stats.prompt_tokens_cached, stats.tokens_generated) == (12, 8, 6)


def test_tenants_with_different_salts_share_nothing() -> None:
    driver = Driver(64)
    driver.answer(request(prompt(16), salt=b"one"))
    assert driver.answer(request(prompt(16), salt=b"two")).cached_tokens == 0
    assert driver.answer(request(prompt(16), salt=b"one")).cached_tokens == 12


# --- where an answer ends ---------------------------------------------------------------------------------------------


def test_a_stop_id_is_delivered_counted_and_last() -> None:
    tokens = alone(request(prompt(9), 12))
    stop = tokens[4]
    outcome = Driver().answer(
        request(prompt(9), stop=StopRules(max_tokens=12, stop_token_ids=(stop,), ignore_eos=True))
    )
    assert outcome.tokens == tokens[: tokens.index(stop) + 1]
    last = outcome.chunks[-1]
    assert last.finish is FinishReason.STOP
    assert last.usage is not None
    assert last.usage.completion_tokens == len(outcome.tokens)


def test_eos_ends_an_answer_unless_ignored() -> None:
    driver = Driver(4096)
    found = 0
    for salt in range(40):
        whole = driver.answer(request(prompt(9, salt), 60)).tokens
        if EOS not in whole:
            continue
        found += 1
        cut = driver.answer(request(prompt(9, salt), stop=StopRules(max_tokens=60)))
        assert cut.tokens == whole[: whole.index(EOS) + 1]
        assert cut.chunks[-1].finish is FinishReason.STOP
    assert found


def test_no_stop_id_is_drawn_before_min_tokens() -> None:
    tokens = alone(request(prompt(9), 12))
    rules = StopRules(max_tokens=12, min_tokens=6, stop_token_ids=(tokens[2],), ignore_eos=True)
    outcome = Driver().answer(request(prompt(9), stop=rules))
    assert outcome.tokens[:2] == tokens[:2]
    assert tokens[2] not in outcome.tokens[:6]
    assert len(outcome.tokens) >= 6


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_is_exact(max_tokens: int) -> None:
    outcome = Driver().answer(request(prompt(9), max_tokens))
    assert len(outcome.tokens) == max_tokens
    assert outcome.chunks[-1].finish is FinishReason.LENGTH
    assert outcome.chunks[-1].usage == Usage(9, 0, max_tokens)


def test_resuming_with_generated_ids_continues_the_same_answer() -> None:
    wanted = request(prompt(9), sampling=SAMPLED, stop=StopRules(max_tokens=12, min_tokens=10), logprobs=3)
    whole = Driver().answer(wanted)
    for cut in range(1, 12):
        resumed = Driver().answer(dataclasses.replace(wanted, generated=tuple(whole.tokens[:cut])))
        assert resumed.tokens == whole.tokens[cut:]
        assert [c.logprobs for c in resumed.chunks] == [c.logprobs for c in whole.chunks[cut:]]
        assert resumed.chunks[-1].usage == whole.chunks[-1].usage
        assert resumed.chunks[-1].finish == whole.chunks[-1].finish


def test_prompt_logprobs_have_one_entry_a_token_even_when_the_prompt_is_cached() -> None:
    driver = Driver(64, max_step_tokens=5)
    wanted = request(prompt(14), 3, prompt_logprobs=2)
    first, second = driver.answer(wanted), driver.answer(wanted)
    assert first.chunks == second.chunks
    entries = first.chunks[0].prompt_logprobs
    assert [e and e.token_id for e in entries] == [None, *wanted.prompt[1:]]
    assert all(e and len(e.top) == 2 for e in entries[1:])
    assert all(not c.prompt_logprobs for c in first.chunks[1:])
