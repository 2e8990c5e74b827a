"""What the gateway makes of a plan's limits and of its word on caching: on every hop, lowering only, and told."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from baton.core.errors import Expired
from baton.core.types import (
    CacheClass,
    CachePolicy,
    FinishReason,
    GenerateRequest,
    Plan,
    PlanLimits,
    PlanQuery,
    StopRules,
)
from tests.unit.gateway.asking import ASK, complete, spelled
from tests.unit.gateway.doubles import Fault, Fleet, RankedPlanner, ScriptedDecode, answer

LIMITS = PlanLimits(max_tokens=9, max_chunk_tokens=64, seconds=3600.0)
CACHE = CachePolicy(CacheClass.NONE, 32)
ENDLESS = replace(ASK, stop=StopRules(ignore_eos=True))


class ForgetfulPlanner(RankedPlanner):
    """Gives its directives to first hops only, as a gateway does that plans by itself."""

    async def plan(self, query: PlanQuery) -> Plan:
        plan = await super().plan(query)
        return replace(plan, limits=PlanLimits(), cache=CachePolicy()) if query.hop else plan


def limited(limits: PlanLimits, *workers: ScriptedDecode) -> Fleet:
    fleet = Fleet(*(workers or (ScriptedDecode("a"),)))
    fleet.planner.limits = limits
    return fleet


def test_the_first_plans_limits_and_cache_policy_are_in_every_hops_request() -> None:
    first, second = ScriptedDecode("a", [Fault(3)]), ScriptedDecode("b")
    fleet = Fleet(first, second, planner=ForgetfulPlanner(["a", "b"]))
    fleet.planner.limits, fleet.planner.cache = LIMITS, CACHE
    chunks = asyncio.run(fleet.ask(ENDLESS))
    sent = [request.tokens for request in (*first.requests, *second.requests)]
    assert [(tokens.stop.max_tokens, tokens.max_chunk_tokens, tokens.cache) for tokens in sent] == [(9, 64, CACHE)] * 2
    assert [query.max_tokens for query in fleet.planner.queries] == [24, 9]
    assert answer(chunks).ids == complete(ENDLESS).ids[:9]
    assert (chunks[-1].finish, chunks[-1].limit) == (FinishReason.LENGTH, "max_tokens")


def test_without_directives_a_request_is_what_it_was() -> None:
    worker = ScriptedDecode("a")
    chunks = asyncio.run(Fleet(worker).ask(ENDLESS))
    [tokens] = [request.tokens for request in worker.requests]
    assert (tokens.max_chunk_tokens, tokens.cache, tokens.stop.max_tokens) == (None, CachePolicy(), 24)
    assert (chunks[-1].finish, chunks[-1].limit) == (FinishReason.LENGTH, "")


def test_the_log_line_of_a_request_tells_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway")
    asyncio.run(limited(PlanLimits(max_tokens=9)).ask(ENDLESS))
    asyncio.run(limited(PlanLimits()).ask(ENDLESS))
    assert [vars(r)["limit"] for r in caplog.records if r.getMessage() == "request ended"] == ["max_tokens", ""]


@pytest.mark.parametrize("allowed", [24, 25, 1000])
def test_a_plan_never_raises_what_was_asked_for(allowed: int) -> None:
    chunks = asyncio.run(limited(PlanLimits(max_tokens=allowed)).ask(ENDLESS))
    assert answer(chunks).ids == complete(ENDLESS).ids
    assert chunks[-1].limit == ""


def test_an_answer_that_stops_by_itself_names_no_limit() -> None:
    drawn = spelled("hello world ")
    fleet = limited(PlanLimits(max_tokens=20), ScriptedDecode("a", drawn=drawn))
    last = asyncio.run(fleet.ask(replace(ENDLESS, stop_strings=("wor",))))[-1]
    assert (last.finish, last.limit) == (FinishReason.STOP, "")


def test_min_tokens_come_down_with_max_tokens() -> None:
    worker = ScriptedDecode("a")
    fleet = limited(PlanLimits(max_tokens=5), worker)
    asyncio.run(fleet.ask(replace(ASK, stop=StopRules(min_tokens=20))))
    stop = worker.requests[0].tokens.stop
    assert (stop.min_tokens, stop.max_tokens) == (5, 5)


@pytest.mark.parametrize("held", [9, 12])
def test_a_resumed_answer_that_is_as_long_as_the_plan_allows_is_over_without_a_worker(held: int) -> None:
    whole = complete(ENDLESS).ids
    worker = ScriptedDecode("a")
    fleet = limited(PlanLimits(max_tokens=9), worker)
    request: GenerateRequest = replace(ENDLESS, request_id="again", resume=(whole[:held],))
    [last] = asyncio.run(fleet.ask(request))
    assert (last.finish, last.limit, last.token_ids, worker.requests) == (FinishReason.LENGTH, "max_tokens", (), [])
    fleet.assert_idle()


@pytest.mark.parametrize("after", [0, 3])
def test_a_time_limit_ends_a_request_with_its_name(after: int) -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = after
    fleet = limited(PlanLimits(seconds=0.05), worker)
    with pytest.raises(Expired, match=r"the plan's time limit of 0\.05 s"):
        asyncio.run(fleet.ask(ASK))
    told = worker.requests[0].tokens.timeout
    assert told is not None and told <= 0.05
    fleet.assert_idle()


def test_a_worker_that_is_first_to_see_the_time_limit_pass_is_told_on_with_its_name() -> None:
    fleet = limited(PlanLimits(seconds=300), ScriptedDecode("a", [Fault(2, Expired("passed in the engine"))]))
    with pytest.raises(Expired, match=r"^passed in the engine \(the plan's time limit of 300 s\)$"):
        asyncio.run(fleet.ask(ASK))


def test_a_shorter_deadline_of_the_caller_stays_and_is_not_blamed_on_the_plan() -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = 0
    with pytest.raises(Expired) as raised:
        asyncio.run(limited(PlanLimits(seconds=3600), worker).ask(replace(ASK, timeout=0.05)))
    assert "limit" not in raised.value.message
