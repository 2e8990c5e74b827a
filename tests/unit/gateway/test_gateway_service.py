from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import (
    BatonError,
    Cancelled,
    Expired,
    InvalidRequest,
    Overloaded,
    PeerUnavailable,
    PermissionDenied,
    StateUnavailable,
    TokenizerMissing,
    UnknownModel,
)
from baton.core.streams import closing
from baton.core.types import ChatMessage, FinishReason, GenerateRequest, Sampling, StopRules, TokenRequest
from baton.telemetry.metrics import PrometheusMeter
from gateway.fanout import choice_seed
from gateway.relay import RelayPolicy
from gateway.service import GatewayPolicy
from tests.unit.gateway.doubles import (
    CARD,
    MODEL,
    VOCAB,
    Answer,
    Fault,
    Fleet,
    RankedPlanner,
    ScriptedDecode,
    answer,
    candidate,
    draw,
    record,
    spelling,
)

Drawn = Callable[[int, Sequence[int]], int]
ASK = GenerateRequest(model=MODEL, prompt_token_ids=(7,), max_tokens=24, seed=5, logprobs=0)
SLOW = settings(max_examples=60, deadline=None)


def complete(request: GenerateRequest, drawn: Drawn = draw, step: int = 1) -> Answer:
    """The answer of a fleet in which nothing goes wrong."""
    return answer(asyncio.run(Fleet(ScriptedDecode("w0", step=step, drawn=drawn)).ask(request)))


def spelled(text: str) -> Drawn:
    return spelling(Fleet().tokenizer, text)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


# --- one hop ----------------------------------------------------------------------------------------------------------


def test_the_keys_priority_goes_to_the_planner_and_to_the_worker() -> None:
    async def run() -> None:
        worker = ScriptedDecode("w0")
        fleet = Fleet(worker)
        fleet.caller = replace(fleet.caller, priority=7)
        await fleet.ask(ASK)
        assert [query.priority for query in fleet.planner.queries] == [7]
        assert [request.tokens.priority for request in worker.requests] == [7]

    asyncio.run(run())


def test_a_key_bound_to_one_model_neither_names_it_nor_hears_of_others() -> None:
    def serving_two(key_models: tuple[str, ...] | None) -> Fleet:
        fleet = Fleet(ScriptedDecode("w0"), key_models=key_models)
        fleet.view.update([record("w0"), record("w1", card=replace(CARD, model="secret"))])
        return fleet

    unnamed = replace(ASK, model="")
    assert answer(asyncio.run(serving_two((MODEL,)).ask(unnamed))).finish is not None
    with pytest.raises(InvalidRequest, match="one of secret, toy"):
        asyncio.run(serving_two(None).ask(unnamed))
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(serving_two(("others",)).ask(unnamed))
    assert "secret" not in refused.value.message


def test_an_answer_has_its_ids_text_logprobs_and_usage() -> None:
    result = complete(replace(ASK, max_tokens=11), spelled("hello "))
    assert result.text == "hello hello"
    assert len(result.ids) == len(result.logprobs) == 11
    assert [entry.token_id for entry in result.logprobs] == list(result.ids)
    assert result.finish is FinishReason.LENGTH
    assert result.usage is not None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (1, 11)


def test_workers_get_the_tenant_its_salt_and_what_the_plan_says() -> None:
    worker = ScriptedDecode("w0")
    fleet = Fleet(worker)
    asyncio.run(fleet.ask(replace(ASK, request_id="mine")))
    [sent] = worker.requests
    assert (sent.tokens.tenant, sent.tokens.salt) == ("acme", fleet.keys.salt("acme"))
    assert (sent.tokens.request_id, sent.tokens.attempt.hop, sent.tokens.sampling.seed) == ("mine", 0, 5)
    assert [peer.worker_id for peer in sent.prefill] == ["prefill-0"]
    assert sent.tokens.timeout is not None


def test_text_and_messages_become_ids() -> None:
    worker = ScriptedDecode("w0")
    fleet = Fleet(worker)
    asyncio.run(fleet.ask(GenerateRequest(text="hé", max_tokens=1)))
    asyncio.run(fleet.ask(GenerateRequest(messages=(ChatMessage("user", "hi"),), max_tokens=1)))
    asyncio.run(fleet.ask(GenerateRequest(text="x" * 400, max_tokens=1)))
    prompts = [fleet.tokenizer.decode(request.tokens.prompt) for request in worker.requests]
    assert prompts == ["hé", "[user]hi", "x" * 400]


def test_an_absent_max_tokens_is_bounded_by_the_policy_and_the_context() -> None:
    worker = ScriptedDecode("w0")
    fleet = Fleet(worker)
    asyncio.run(fleet.ask(replace(ASK, max_tokens=None)))
    assert worker.requests[0].tokens.stop.max_tokens == 511


def test_a_request_without_seed_draws_by_its_id_and_tenant() -> None:
    worker = ScriptedDecode("w0")
    fleet = Fleet(worker)
    for request_id in ("a", "a", "b"):
        asyncio.run(fleet.ask(replace(ASK, seed=None, request_id=request_id)))
    first, again, other = (request.tokens.sampling.seed for request in worker.requests)
    assert first == again != other


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (replace(ASK, model="nope"), UnknownModel),
        (replace(ASK, prompt_token_ids=(VOCAB,)), InvalidRequest),
        (replace(ASK, max_tokens=512), InvalidRequest),
        (replace(ASK, max_tokens=0), InvalidRequest),
    ],
)
def test_refuses_before_any_worker_is_asked(request_: GenerateRequest, error: type[BatonError]) -> None:
    worker = ScriptedDecode("w0")
    fleet = Fleet(worker)
    with pytest.raises(error):
        asyncio.run(fleet.ask(request_))
    assert not worker.requests
    fleet.assert_idle()


def test_a_model_without_tokenizer_serves_ids_only() -> None:
    fleet = Fleet(ScriptedDecode("w0"), text=False)
    result = answer(asyncio.run(fleet.ask(ASK)))
    assert result.ids
    assert not result.text
    for request in (
        GenerateRequest(text="x"),
        GenerateRequest(messages=(ChatMessage("user", "x"),)),
        replace(ASK, stop_strings=("x",)),
    ):
        with pytest.raises(TokenizerMissing):
            asyncio.run(fleet.ask(request))


def test_a_request_without_a_model_is_counted_under_the_one_that_answers() -> None:
    meter = PrometheusMeter()
    fleet = Fleet(ScriptedDecode("w0"), meter=meter)
    asyncio.run(fleet.ask(replace(ASK, model="")))
    with pytest.raises(UnknownModel):
        asyncio.run(fleet.ask(replace(ASK, model="nope")))
    exposition = meter.exposition().decode()
    assert f'baton_requests_total{{model="{MODEL}",outcome="OK"}} 1.0' in exposition
    assert 'baton_requests_total{model="other",outcome="UNKNOWN_MODEL"} 1.0' in exposition


def test_models_tell_what_they_are_and_only_what_the_key_may_use() -> None:
    fleet = Fleet(ScriptedDecode("w0"), ScriptedDecode("w1"))
    [info] = asyncio.run(fleet.gateway.list_models(fleet.caller))
    assert (info.model, info.workers, info.has_tokenizer, info.has_chat_template) == (MODEL, 2, True, True)
    stranger = replace(fleet.caller, key_id="other")
    assert not asyncio.run(fleet.gateway.list_models(stranger))
    with pytest.raises(PermissionDenied):
        asyncio.run(fleet.gateway.get_model(MODEL, stranger))


def test_counts_tokens_as_generate_would() -> None:
    fleet = Fleet(ScriptedDecode("w0"))
    ids = asyncio.run(fleet.gateway.count_tokens(GenerateRequest(model=MODEL, text="abc"), fleet.caller))
    assert fleet.tokenizer.decode(ids) == "abc"


# --- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, 24])
def test_tokens_past_a_stop_string_are_neither_delivered_nor_charged(step: int) -> None:
    result = complete(replace(ASK, stop_strings=("lo w",)), spelled("hello world "), step)
    assert result.text == "hel"
    assert len(result.ids) == len(result.logprobs) == len("hello w")
    assert result.finish is FinishReason.STOP
    assert result.usage is not None
    assert result.usage.completion_tokens == len("hello w")


def test_a_stop_string_lets_the_worker_go_before_the_last_chunk_is_read() -> None:
    worker = ScriptedDecode("w0", drawn=spelled("ab."))
    fleet = Fleet(worker)

    async def ask() -> int:
        async with closing(fleet.gateway.generate(replace(ASK, stop_strings=(".",)), fleet.caller)) as chunks:
            async for chunk in chunks:
                if chunk.finish is not None:
                    return worker.open
        return -1

    assert asyncio.run(ask()) == 0


def test_text_held_back_for_a_stop_string_is_given_out_at_the_end() -> None:
    result = complete(replace(ASK, max_tokens=5, stop_strings=("lo world",)), spelled("hello"))
    assert (result.text, result.finish) == ("hello", FinishReason.LENGTH)


def test_a_worker_that_sends_too_much_is_cut_at_max_tokens() -> None:
    class Generous(ScriptedDecode):
        def _finish(self, request: TokenRequest, ids: Sequence[int]) -> FinishReason | None:
            return super()._finish(replace(request, stop=StopRules(max_tokens=100)), ids)

    result = answer(asyncio.run(Fleet(Generous("a", step=5, drawn=spelled("hello "))).ask(ASK)))
    assert (len(result.ids), len(result.logprobs), result.finish) == (24, 24, FinishReason.LENGTH)
    assert result.usage is not None
    assert result.usage.completion_tokens == 24


# --- hops -------------------------------------------------------------------------------------------------------------


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


# --- resumed by the client --------------------------------------------------------------------------------------------


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


# --- several choices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 5])
def test_choices_equal_single_requests_with_their_derived_seeds(step: int) -> None:
    fleet = Fleet(ScriptedDecode("a", step=step))
    chunks = asyncio.run(fleet.ask(replace(ASK, n=4, sampling=Sampling(temperature=1.0))))
    for index in range(4):
        alone = complete(replace(ASK, seed=choice_seed(5, index)))
        assert answer(chunks, index).ids == alone.ids
        assert answer(chunks, index).text == alone.text
    fleet.assert_idle()


def test_later_choices_follow_the_first_token_to_the_same_worker() -> None:
    a, b = ScriptedDecode("a", [Fault(0, Overloaded("full"))]), ScriptedDecode("b")
    fleet = Fleet(a, b)
    asyncio.run(fleet.ask(replace(ASK, n=3)))
    assert (len(a.requests), len(b.requests)) == (1, 3)
    ids = [request.tokens.request_id for request in b.requests]
    assert len(set(ids)) == 3


def test_other_choices_wait_until_the_first_has_a_token() -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = 0
    fleet = Fleet(worker)

    async def ask() -> int:
        task = asyncio.create_task(fleet.ask(replace(ASK, n=3)))
        await eventually(lambda: worker.open == 1)
        for _ in range(50):
            await asyncio.sleep(0)
        started = len(worker.requests)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return started

    assert asyncio.run(ask()) == 1
    fleet.assert_idle()


def test_all_choices_end_with_the_error_of_one() -> None:
    fleet = Fleet(ScriptedDecode("a", [None, Fault(2, InvalidRequest("no"))]))
    with pytest.raises(InvalidRequest):
        asyncio.run(fleet.ask(replace(ASK, n=3)))
    fleet.assert_idle()


def test_a_bug_in_one_choice_ends_the_request_instead_of_hanging_it() -> None:
    def broken(seed: int, context: Sequence[int]) -> int:
        return draw(seed, context) if seed == 5 else 1 // 0

    fleet = Fleet(ScriptedDecode("a", drawn=broken))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(fleet.ask(replace(ASK, n=2)))
    fleet.assert_idle()


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("chunks_read", [1, 4])
def test_closing_the_stream_frees_everything(n: int, chunks_read: int) -> None:
    fleet = Fleet(ScriptedDecode("a"))

    async def read() -> None:
        async with closing(fleet.gateway.generate(replace(ASK, n=n), fleet.caller)) as chunks:
            left = chunks_read
            async for _ in chunks:
                left -= 1
                if not left:
                    break

    asyncio.run(read())
    fleet.assert_idle()


@pytest.mark.parametrize("after", [0, 3])
def test_cancelling_the_call_frees_everything(after: int) -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = after
    fleet = Fleet(worker)

    async def ask() -> None:
        task = asyncio.create_task(fleet.ask(ASK))
        await eventually(lambda: worker.open == 1 and worker.sent >= after)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(ask())
    fleet.assert_idle()


@pytest.mark.parametrize("after", [0, 3])
def test_the_deadline_ends_a_request_with_expired(after: int) -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = after
    fleet = Fleet(worker)
    with pytest.raises(Expired):
        asyncio.run(fleet.ask(replace(ASK, timeout=0.05)))
    fleet.assert_idle()


def test_a_call_without_deadline_has_the_default_one() -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = 0
    fleet = Fleet(worker, policy=GatewayPolicy(default_timeout=0.05))
    with pytest.raises(Expired):
        asyncio.run(fleet.ask(ASK))


def test_a_second_call_with_the_same_id_takes_the_request_over() -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = 2
    fleet = Fleet(worker)

    async def ask() -> Answer:
        older = asyncio.create_task(fleet.ask(replace(ASK, request_id="r")))
        await eventually(lambda: worker.sent >= 2)
        worker.hang_after = None
        newer = await fleet.ask(replace(ASK, request_id="r"))
        with pytest.raises(Cancelled, match="taken over"):
            await older
        return answer(newer)

    assert asyncio.run(ask()).ids == complete(ASK).ids
    fleet.assert_idle()


def test_the_same_id_of_another_tenant_is_another_request() -> None:
    worker = ScriptedDecode("a")
    fleet = Fleet(worker)
    stranger = replace(fleet.caller, tenant="zeta")

    async def ask() -> None:
        async with closing(fleet.gateway.generate(replace(ASK, request_id="r"), fleet.caller)) as mine:
            await anext(mine)
            async for _ in fleet.gateway.generate(replace(ASK, request_id="r"), stranger):
                pass
            async for _ in mine:
                pass

    asyncio.run(ask())
    fleet.assert_idle()


def test_a_known_model_without_ready_workers_is_overloaded_and_not_unknown() -> None:
    fleet = Fleet(ScriptedDecode("a"), planner=RankedPlanner([]))
    fleet.view.update([])
    with pytest.raises(Overloaded):
        asyncio.run(fleet.ask(ASK))


def test_before_the_registry_was_read_no_model_is_called_unknown() -> None:
    fleet = Fleet(ScriptedDecode("a"))
    fleet.view.known = False
    fleet.view._cards.clear()
    for model in (MODEL, ""):
        with pytest.raises(StateUnavailable):
            asyncio.run(fleet.ask(replace(ASK, model=model)))
