from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import CorruptTransfer, Expired, InvalidRequest, Overloaded, TransferRejected
from baton.core.types import FilledBlocks, FinishReason, FirstToken, Sampling, StopRules, TokenRequest, Usage
from baton.engine.fake import EOS
from baton.engine.messages import Decode, Release
from baton.engine.runner import RunnerTimes
from tests.unit.engine.core_driver import Driver, prompt, request

SAMPLED = Sampling(temperature=0.7, seed=11, repetition_penalty=1.1)


@pytest.fixture(params=[0, 1], ids=["in step", "one step ahead"], autouse=True)
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every promise here holds whether or not a step is launched before the one before it is collected."""
    monkeypatch.setattr(Driver, "steps_ahead", request.param)
    return request.param


def alone(wanted: TokenRequest) -> list[int]:
    """The tokens of a request that has an engine to itself."""
    return Driver(512).answer(wanted).tokens


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
                sampling=draw(st.sampled_from([Sampling(), SAMPLED])),
                prompt_logprobs=draw(st.sampled_from([None, 1])),
            )
        )
    return wanted


@settings(max_examples=60, deadline=None)
@given(
    mixes(), st.integers(10, 24), st.integers(1, 40), st.integers(1, 8), st.integers(0, 16), st.lists(st.integers(0, 3))
)
def test_any_mix_under_any_pressure_gives_the_tokens_of_each_alone(
    wanted: list[TokenRequest], blocks: int, step_tokens: int, running: int, growth: int, pauses: list[int]
) -> None:
    driver = Driver(blocks, max_step_tokens=step_tokens, max_running=running, growth_window=growth)
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


# --- prefill and hand-over --------------------------------------------------------------------------------------------


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


# --- leaving, refusing, failing ---------------------------------------------------------------------------------------


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
