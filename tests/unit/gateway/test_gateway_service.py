"""A request that meets no trouble: what is sent to workers, what comes back, what is refused, where it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.errors import (
    BatonError,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    StateUnavailable,
    TokenizerMissing,
    UnknownModel,
)
from baton.core.streams import closing
from baton.core.types import ChatMessage, FinishReason, GenerateRequest, StopRules, Tier, TokenRequest
from baton.telemetry.metrics import PrometheusMeter
from tests.unit.gateway.asking import ASK, complete, spelled
from tests.unit.gateway.doubles import CARD, MODEL, VOCAB, Fleet, RankedPlanner, ScriptedDecode, answer, record

# --- one hop ----------------------------------------------------------------------------------------------------------


def test_the_keys_priority_and_what_its_tenant_may_have_of_workers_go_to_the_planner_and_to_the_worker() -> None:
    async def run() -> None:
        worker = ScriptedDecode("w0")
        fleet = Fleet(worker)
        account = fleet.caller.payer
        tenant = replace(account.tenant, tier=Tier.SILVER, max_kv_blocks=40, pool="own")
        fleet.view.update([replace(record("w0"), labels=("own",))])
        fleet.caller = replace(fleet.caller, priority=7, account=replace(account, tenant=tenant))
        await fleet.ask(ASK)
        [query], [sent] = fleet.planner.queries, [one.tokens for one in worker.requests]
        assert (query.priority, query.tier, query.pool, query.tenant_max_blocks) == (7, Tier.SILVER, "own", 40)
        assert (sent.priority, sent.tier, sent.tenant_max_blocks) == (7, Tier.SILVER, 40)

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
    assert (sent.tokens.tenant, sent.tokens.salt) == ("acme", fleet.caller.salt)
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
    payer = fleet.caller.payer
    stranger = replace(fleet.caller, account=replace(payer, key=replace(payer.key, models=("other",))))
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
