"""A stream that moves to another worker, or that its client resumes, is the same stream."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import Overloaded, PeerUnavailable
from baton.core.types import FinishReason, GenerateRequest, StopRules
from gateway.fanout import choice_seed
from gateway.relay import RelayPolicy
from tests.unit.gateway.asking import ASK, SLOW, complete, spelled
from tests.unit.gateway.doubles import Fault, Fleet, ScriptedDecode, answer, candidate


@SLOW
@given(data=st.data(), steps=st.tuples(st.integers(1, 4), st.integers(1, 4)), seed=st.integers(0, 40))
def test_a_stream_that_loses_its_worker_anywhere_is_the_same_stream(
    data: st.DataObject, steps: tuple[int, int], seed: int
) -> None:
    request = replace(ASK, seed=seed, logprobs=0)
    alone = complete(request)
    cuts = data.draw(st.lists(st.integers(0, max(0, len(alone.ids) - 1)), min_size=1, max_size=3))
    workers = [ScriptedDecode(f"w{i}", [Fault(cut)], step=steps[i % 2]) for i, cut in enumerate(cuts)]
    fleet = Fleet(*workers, ScriptedDecode("last", step=steps[1]))
    moved = answer(asyncio.run(fleet.ask(request)))
    assert replace(moved, migrations=0, usage=None) == replace(alone, migrations=0, usage=None)
    assert moved.usage is not None
    assert alone.usage is not None
    assert moved.usage.completion_tokens == alone.usage.completion_tokens
    assert moved.usage.cached_tokens == alone.usage.cached_tokens
    assert moved.migrations <= len(cuts)
    fleet.assert_idle()


@SLOW
@given(cut=st.integers(0, 23), step=st.integers(1, 5), stop=st.sampled_from(["world", "d h", "🙂", "lo wo", "zzz"]))
def test_a_stop_string_is_found_across_hops(cut: int, step: int, stop: str) -> None:
    drawn = spelled("hello 🙂 world ")
    request = replace(ASK, stop_strings=(stop,))
    alone = complete(request, drawn)
    fleet = Fleet(ScriptedDecode("a", [Fault(cut)], step=step, drawn=drawn), ScriptedDecode("b", drawn=drawn))
    moved = answer(asyncio.run(fleet.ask(request)))
    assert (moved.ids, moved.text, moved.logprobs, moved.finish) == (
        alone.ids,
        alone.text,
        alone.logprobs,
        alone.finish,
    )


def test_a_hop_carries_prompt_and_generated_ids_apart_and_avoids_the_lost_worker() -> None:
    first, second = ScriptedDecode("a", [Fault(3)]), ScriptedDecode("b")
    fleet = Fleet(first, second)
    result = answer(asyncio.run(fleet.ask(replace(ASK, prompt_logprobs=0))))
    [hop] = second.requests
    assert (hop.tokens.prompt, hop.tokens.generated) == ((7,), result.ids[:3])
    assert (hop.tokens.attempt.hop, hop.tokens.prompt_logprobs) == (1, None)
    assert hop.tokens.request_id == first.requests[0].tokens.request_id
    assert fleet.planner.queries[-1].avoid == ("a",)
    assert result.migrations == 1


def test_the_plans_attention_window_is_in_every_hops_request() -> None:
    first, second = ScriptedDecode("a", [Fault(3)]), ScriptedDecode("b")
    fleet = Fleet(first, second)
    fleet.planner.attention_window = 64
    asyncio.run(fleet.ask(ASK))
    assert [request.tokens.attention_window for request in (*first.requests, *second.requests)] == [64, 64]
    assert [query.attention_window for query in fleet.planner.queries] == [None, 64]


@pytest.mark.parametrize("speculation", [True, False])
def test_a_worker_is_told_what_the_plan_says_of_speculation(speculation: bool) -> None:
    worker = ScriptedDecode("a")
    fleet = Fleet(worker)
    fleet.planner.speculation = speculation
    asyncio.run(fleet.ask(ASK))
    assert [request.tokens.speculation for request in worker.requests] == [speculation]


def test_placement_names_the_first_prefill_and_the_latest_decode_worker() -> None:
    fleet = Fleet(ScriptedDecode("a", [Fault(3)]), ScriptedDecode("b"))
    last = asyncio.run(fleet.ask(ASK))[-1]
    assert last.placement is not None
    assert (last.placement.prefill_worker, last.placement.decode_worker) == ("prefill-of-a", "b")
    assert last.placement.kv_bytes == 200


def test_a_stream_that_ends_without_a_finish_is_continued() -> None:
    fleet = Fleet(ScriptedDecode("a", [Fault(2, None)]), ScriptedDecode("b"))
    assert answer(asyncio.run(fleet.ask(ASK))).ids == complete(ASK).ids


def test_an_overloaded_candidate_is_passed_over_without_a_migration() -> None:
    fleet = Fleet(ScriptedDecode("a", [Fault(0, Overloaded("full"))]), ScriptedDecode("b"))
    result = answer(asyncio.run(fleet.ask(ASK)))
    assert result.migrations == 0
    assert len(fleet.planner.queries) == 1


def test_when_all_are_overloaded_the_client_hears_when_to_come_back() -> None:
    full = [Fault(0, Overloaded("full", retry_after=seconds)) for seconds in (3.0, 2.0)]
    fleet = Fleet(ScriptedDecode("a", full[:1]), ScriptedDecode("b", full[1:]))
    with pytest.raises(Overloaded) as caught:
        asyncio.run(fleet.ask(ASK))
    assert caught.value.retry_after == 2.0
    fleet.assert_idle()


def test_a_started_answer_waits_for_the_only_worker_to_come_back() -> None:
    fleet = Fleet(ScriptedDecode("a", [Fault(3)]))
    assert answer(asyncio.run(fleet.ask(ASK))).ids == complete(ASK).ids


def test_a_worker_that_stays_away_for_a_while_is_lost_once() -> None:
    """It streams, dies, cannot be reached nine times, and is there again."""
    fleet = Fleet(ScriptedDecode("a", [Fault(3), *[Fault(0)] * 9]), relay=RelayPolicy(lost_workers=1, patience=20))
    result = answer(asyncio.run(fleet.ask(ASK)))
    assert result.ids == complete(ASK).ids
    assert result.migrations == 1


def test_patience_with_a_worker_that_never_comes_back_ends() -> None:
    fleet = Fleet(ScriptedDecode("a", [Fault(0)] * 1000), relay=RelayPolicy(lost_workers=9, patience=0.3))
    with pytest.raises((PeerUnavailable, Overloaded)):
        asyncio.run(fleet.ask(ASK))
    fleet.assert_idle()


@SLOW
@given(data=st.data(), n=st.integers(1, 3))
def test_whatever_fails_the_answer_is_complete_and_exact_or_one_typed_error(data: st.DataObject, n: int) -> None:
    faults = st.none() | st.builds(
        Fault, st.integers(0, 24), st.sampled_from([PeerUnavailable("gone"), Overloaded("full"), None])
    )
    workers = [ScriptedDecode(f"w{i}", data.draw(st.lists(faults, max_size=4)), step=i + 1) for i in range(3)]
    fleet = Fleet(*workers, relay=RelayPolicy(3, 0.0))
    try:
        chunks = asyncio.run(fleet.ask(replace(ASK, n=n)))
    except (PeerUnavailable, Overloaded):
        fleet.assert_idle()
        return
    for index in range(n):
        alone = complete(replace(ASK, seed=choice_seed(5, index)))
        mine = answer(chunks, index)
        assert (mine.ids, mine.text, mine.logprobs, mine.finish) == (
            alone.ids,
            alone.text,
            alone.logprobs,
            alone.finish,
        )
    fleet.assert_idle()


def test_a_request_that_loses_worker_after_worker_ends_with_a_typed_error() -> None:
    fleet = Fleet(*[ScriptedDecode(f"w{i}", [Fault(1)]) for i in range(6)], relay=RelayPolicy(2, 1.0))
    with pytest.raises(PeerUnavailable):
        asyncio.run(fleet.ask(ASK))
    assert sum(len(worker.requests) for worker in fleet.workers.values()) == 3
    fleet.assert_idle()


def test_new_requests_avoid_a_worker_that_has_just_failed() -> None:
    first = ScriptedDecode("a", [Fault(0)])
    fleet = Fleet(first, ScriptedDecode("b"))
    asyncio.run(fleet.ask(ASK))
    asyncio.run(fleet.ask(ASK))
    assert len(first.requests) == 1
    assert fleet.planner.queries[-1].avoid == ("a",)


def test_a_suspected_worker_is_used_when_there_is_no_other() -> None:
    fleet = Fleet(ScriptedDecode("a"))
    fleet.view.mark_down(candidate("a"))
    assert answer(asyncio.run(fleet.ask(ASK))).ids == complete(ASK).ids


@SLOW
@given(data=st.data(), step=st.integers(1, 4), stops=st.sampled_from([(), ("lo w",), ("ld",)]))
def test_a_client_that_resumes_after_any_chunk_gets_the_rest_of_the_same_stream(
    data: st.DataObject, step: int, stops: tuple[str, ...]
) -> None:
    drawn = spelled("hello 🙂 world ")
    request = replace(ASK, request_id="r", stop_strings=stops)
    chunks = asyncio.run(Fleet(ScriptedDecode("a", step=step, drawn=drawn)).ask(request))
    got = chunks[: data.draw(st.integers(0, len(chunks) - 1))]
    ids = tuple(token for chunk in got for token in chunk.token_ids)
    rest = asyncio.run(Fleet(ScriptedDecode("b", drawn=drawn)).ask(replace(request, resume=(ids,))))
    whole, joined = answer(chunks), answer([*got, *rest])
    assert (joined.ids, joined.text, joined.finish) == (whole.ids, whole.text, whole.finish)
    assert joined.logprobs == whole.logprobs
    assert joined.usage is not None
    assert joined.usage.completion_tokens == len(whole.ids)


@pytest.mark.parametrize(
    ("resume", "request_", "finish"),
    [
        ((1, 2, 3), replace(ASK, max_tokens=3), FinishReason.LENGTH),
        ((1, 256), ASK, FinishReason.STOP),
        ((1, 9), replace(ASK, stop=StopRules(stop_token_ids=(9,))), FinishReason.STOP),
    ],
)
def test_a_resume_that_is_the_whole_answer_asks_no_worker(
    resume: tuple[int, ...], request_: GenerateRequest, finish: FinishReason
) -> None:
    worker = ScriptedDecode("a")
    [chunk] = asyncio.run(Fleet(worker).ask(replace(request_, request_id="r", resume=(resume,))))
    assert (chunk.finish, chunk.token_ids) == (finish, ())
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == len(resume)
    assert not worker.requests
