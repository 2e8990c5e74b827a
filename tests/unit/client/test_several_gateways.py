"""A client that knows several gateways, while some of them are gone or about to end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from baton.client import Client, ResumePolicy
from baton.core.clock import ManualClock
from baton.core.errors import (
    BatonError,
    Draining,
    Expired,
    InvalidRequest,
    Overloaded,
    PeerUnavailable,
    StateUnavailable,
)
from baton.rpc.serving import RunningServer
from tests.unit.client.doors import ASK, PATIENT, door
from tests.unit.gateway.doubles import MODEL, Fault, Fleet, ScriptedDecode

NOBODY = "127.0.0.1:1"
ONE_ROUND = ResumePolicy(attempts_unanswered=0)

Scenario = Callable[[list[RunningServer]], Awaitable[None]]


def gateways(*workers: ScriptedDecode) -> list[Fleet]:
    """One for each worker. They know the same keys."""
    fleets = [Fleet(worker) for worker in workers]
    for fleet in fleets:
        fleet.callers = fleets[0].callers
    return fleets


def run(fleets: list[Fleet], scenario: Scenario) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await scenario([await stack.enter_async_context(door(fleet)) for fleet in fleets])

    asyncio.run(main())
    for fleet in fleets:
        fleet.assert_idle()


def test_a_draining_gateway_is_left_for_the_next_one_without_a_pause() -> None:
    first, second = ScriptedDecode("a"), ScriptedDecode("b")
    fleets = gateways(first, second)
    clock = ManualClock()
    begun = clock.now()

    async def scenario(servers: list[RunningServer]) -> None:
        await servers[0].drain(0)
        async with Client([server.address for server in servers], fleets[0].key, clock=clock) as client:
            assert (await client.ask(ASK)).choices[0].token_ids
            assert (await client.ask(ASK)).choices[0].token_ids

    run(fleets, scenario)
    assert (len(first.requests), len(second.requests)) == (0, 2)
    assert clock.now() == begun


@pytest.mark.parametrize("error", [PeerUnavailable("no worker is left"), StateUnavailable("the registry is silent")])
def test_the_next_gateway_is_asked_under_the_same_request_id(error: BatonError) -> None:
    """What the first one may have reserved is then the same admission, and charged once."""
    first, second = ScriptedDecode("a", [Fault(0, error)] * 20), ScriptedDecode("b")
    fleets = gateways(first, second)

    async def scenario(servers: list[RunningServer]) -> None:
        async with Client([server.address for server in servers], fleets[0].key) as client:
            answer = await client.ask(ASK)
            assert {sent.tokens.request_id for sent in first.requests + second.requests} == {answer.request_id}

    run(fleets, scenario)
    assert first.requests
    assert len(second.requests) == 1


def test_every_gateway_is_asked_before_a_request_without_an_answer_is_given_up() -> None:
    fleets = gateways(ScriptedDecode("a"))

    async def scenario(servers: list[RunningServer]) -> None:
        dead = [f"127.0.0.1:{port}" for port in range(1, 6)]
        async with Client([*dead, servers[0].address], fleets[0].key, resume=ONE_ROUND) as client:
            assert (await client.ask(ASK)).choices[0].token_ids
        async with Client(dead, fleets[0].key, resume=ONE_ROUND) as client:
            with pytest.raises(PeerUnavailable):
                await client.ask(ASK)

    run(fleets, scenario)


def test_when_all_gateways_drain_the_caller_is_told_so() -> None:
    fleets = gateways(ScriptedDecode("a"), ScriptedDecode("b"))

    async def scenario(servers: list[RunningServer]) -> None:
        for server in servers:
            await server.drain(0)
        async with Client([server.address for server in servers], fleets[0].key, clock=ManualClock()) as client:
            with pytest.raises(Draining):
                await client.ask(ASK)

    run(fleets, scenario)


def test_a_gateway_without_capacity_is_an_answer_and_no_other_one_is_asked() -> None:
    """They share the workers."""
    first, second = ScriptedDecode("a", [Fault(0, Overloaded("full", retry_after=7.0))]), ScriptedDecode("b")
    fleets = gateways(first, second)

    async def scenario(servers: list[RunningServer]) -> None:
        async with Client([server.address for server in servers], fleets[0].key) as client:
            with pytest.raises(Overloaded, match="full"):
                await client.ask(ASK)

    run(fleets, scenario)
    assert second.requests == []


def test_the_deadline_ends_the_search_for_a_gateway() -> None:
    async def main() -> None:
        async with Client([NOBODY, "127.0.0.1:2"], "k.s", resume=PATIENT) as client:
            with pytest.raises(Expired):
                await client.complete(prompt_token_ids=[7], timeout=0.2)

    asyncio.run(main())


def test_many_requests_at_once_that_meet_a_dead_gateway_all_find_the_living_one() -> None:
    fleets = gateways(ScriptedDecode("a"))

    async def scenario(servers: list[RunningServer]) -> None:
        addresses = [NOBODY, servers[0].address, "127.0.0.1:2", "127.0.0.1:3"]
        async with Client(addresses, fleets[0].key, resume=ONE_ROUND, clock=ManualClock()) as client:
            asked = (client.complete(prompt_token_ids=[7], max_tokens=2, ignore_eos=True) for _ in range(8))
            answers = await asyncio.gather(*asked)
            assert [len(answer.choices[0].token_ids) for answer in answers] == [2] * 8

    run(fleets, scenario)


def test_a_question_about_models_goes_to_the_next_gateway_too() -> None:
    fleets = gateways(ScriptedDecode("a"), ScriptedDecode("b"))

    async def scenario(servers: list[RunningServer]) -> None:
        await servers[0].drain(0)
        for first in (NOBODY, servers[0].address):
            async with Client([first, servers[1].address], fleets[0].key) as client:
                assert [info.model for info in await client.models(timeout=20)] == [MODEL]
            async with Client([first, servers[1].address], fleets[0].key) as client:
                assert (await client.model()).model == MODEL
            async with Client([first, servers[1].address], fleets[0].key) as client:
                assert len(await client.count_tokens(text="abc")) == 3
        async with Client([NOBODY, servers[0].address], fleets[0].key) as client:
            with pytest.raises(Draining):
                await client.models()

    run(fleets, scenario)


@pytest.mark.parametrize("address", ["", [], ["127.0.0.1:1", ""]])
def test_a_client_without_an_address_is_refused(address: str | list[str]) -> None:
    with pytest.raises(InvalidRequest, match="address: must be"):
        Client(address, "k.s")


def test_other_gateways_are_tried_at_once_and_pauses_double_after_them() -> None:
    policy = ResumePolicy(attempts=4, attempts_unanswered=2, first_pause=1.0, longest_pause=4.0)
    assert [policy.pause(n, 2, started=True) for n in range(1, 8)] == [0, 0, 1, 2, 4, 4, None]
    assert [policy.pause(n, 2, started=False) for n in range(1, 6)] == [0, 0, 1, 2, None]
    assert [policy.pause(n, 0, started=False) for n in range(1, 4)] == [1, 2, None]
    assert ResumePolicy(attempts=0).pause(1, 5, started=True) is None
