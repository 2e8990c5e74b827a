"""What the gateway charges: what was delivered, once, on every path; and nothing for what it refuses."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.errors import Overloaded, PeerUnavailable, QuotaExceeded
from baton.core.streams import closing
from baton.core.types import (
    Account,
    EngineStats,
    GenerateChunk,
    KeyRecord,
    LedgerEntry,
    Limits,
    Metric,
    Organisation,
    StopRules,
    Tenant,
)
from tests.unit.gateway.asking import ASK, spelled
from tests.unit.gateway.doubles import Fault, Fleet, ScriptedDecode, record

WHOLE = replace(ASK, stop=StopRules(ignore_eos=True), request_id="r1")  # 1 token in, 24 out


def limited(fleet: Fleet, limits: Limits) -> None:
    account = Account(
        Organisation("umbrella"), Tenant("acme", "umbrella", limits=limits), KeyRecord("k", "acme", "", "")
    )
    fleet.caller = replace(fleet.caller, account=account)


async def charged(fleet: Fleet) -> list[LedgerEntry]:
    return [*await fleet.quota.entries(fleet.caller.payer.organisation.name)]


async def reserved(fleet: Fleet) -> int:
    balances = await fleet.quota.balances(fleet.caller.payer, WHOLE.model)
    return sum(balance.reserved for balance in balances)


def figures(entry: LedgerEntry) -> tuple[int, int, int]:
    return entry.requests, entry.input_tokens, entry.output_tokens


def test_a_request_is_charged_its_prompt_once_and_the_tokens_of_all_choices() -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0"))
        await fleet.ask(replace(WHOLE, n=3))
        [entry] = await charged(fleet)
        assert figures(entry) == (1, 1, 72)
        assert (entry.tenant, entry.key_id, entry.model, entry.request_id) == ("acme", "local", "toy", "r1")
        assert await reserved(fleet) == 0

    asyncio.run(body())


def test_energy_that_workers_measure_is_in_the_ledger() -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0"))
        for joules, tokens in ((0.0, 0), (200.0, 100)):  # 2 a token
            stats = EngineStats(energy_joules=joules, tokens_generated=tokens)
            fleet.view.update([replace(record("w0"), stats=stats)])
        await fleet.ask(WHOLE)
        [entry] = await charged(fleet)
        assert entry.energy_millijoules == 24 * 2000  # what its prefill worker uses is not known

    asyncio.run(body())


def test_tokens_past_a_stop_string_are_not_charged() -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0", step=5, drawn=spelled("hello world ")))
        chunks = await fleet.ask(replace(WHOLE, stop_strings=("lo w",)))
        [entry] = await charged(fleet)
        assert entry.output_tokens == sum(len(chunk.token_ids) for chunk in chunks) < 24

    asyncio.run(body())


def test_a_stream_that_moves_is_charged_once() -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("a", [Fault(5)]), ScriptedDecode("b"))
        await fleet.ask(WHOLE)
        assert [figures(entry) for entry in await charged(fleet)] == [(1, 1, 24)]

    asyncio.run(body())


def test_a_request_that_its_client_resumes_is_charged_the_whole_answer_once() -> None:
    """The gateway that served its beginning died without a word."""

    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0"))
        held = [token for chunk in await Fleet(ScriptedDecode("x")).ask(WHOLE) for token in chunk.token_ids][:10]
        await fleet.ask(replace(WHOLE, resume=(tuple(held),)))
        assert [figures(entry) for entry in await charged(fleet)] == [(1, 1, 24)]

    asyncio.run(body())


def test_a_client_that_leaves_is_charged_what_it_got() -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0"))
        got: list[GenerateChunk] = []
        async with closing(fleet.gateway.generate(WHOLE, fleet.caller)) as chunks:
            async for chunk in chunks:
                got.append(chunk)
                if len(got) == 4:
                    break
        [entry] = await charged(fleet)
        assert figures(entry) == (1, 1, sum(len(chunk.token_ids) for chunk in got))
        assert await reserved(fleet) == 0
        fleet.assert_idle()

    asyncio.run(body())


def test_a_request_that_never_began_for_a_reason_of_ours_costs_nothing() -> None:
    async def body() -> None:
        for error in (Overloaded("full"), PeerUnavailable("gone")):
            fleet = Fleet(ScriptedDecode("w0", [Fault(0, error)] * 9))
            limited(fleet, Limits(requests_per_minute=1, tokens_per_minute=30))
            with pytest.raises((Overloaded, PeerUnavailable)):
                await fleet.ask(WHOLE)
            assert await charged(fleet) == [] and await reserved(fleet) == 0
            fleet.workers["w0"]._faults.clear()
            await fleet.ask(replace(WHOLE, request_id="r2"))

    asyncio.run(body())


REFUSING = {
    Metric.REQUESTS_PER_MINUTE: Limits(requests_per_minute=0),
    Metric.INPUT_TOKENS_PER_MINUTE: Limits(input_tokens_per_minute=0),
    Metric.OUTPUT_TOKENS_PER_MINUTE: Limits(output_tokens_per_minute=23),
    Metric.TOKENS_PER_MINUTE: Limits(tokens_per_minute=24),
    Metric.TOKENS_PER_DAY: Limits(tokens_per_day=24),
    Metric.TOKENS_PER_MONTH: Limits(tokens_per_month=24),
    Metric.CONCURRENCY: Limits(concurrency=0),
}


@pytest.mark.parametrize("metric", REFUSING)
def test_a_request_over_a_limit_reaches_no_worker_and_its_refusal_is_remembered(metric: Metric) -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0"))
        limited(fleet, REFUSING[metric])
        with pytest.raises(QuotaExceeded, match=f"tenant 'acme': {metric}"):
            await fleet.ask(WHOLE)
        assert fleet.workers["w0"].requests == [] and fleet.planner.queries == []
        assert await charged(fleet) == [] and await reserved(fleet) == 0
        await fleet.gateway._parts.refusals.write()
        note = await fleet.refusals.find("acme", "r1")
        assert note is not None and (note.key_id, note.input_tokens, note.output_tokens) == ("k", 1, 24)
        assert [refusal.metric for refusal in note.refusals] == [metric]

    asyncio.run(body())


def test_requests_at_once_are_limited_and_the_next_one_passes_when_one_has_ended() -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0"))
        limited(fleet, Limits(concurrency=1))
        async with closing(fleet.gateway.generate(WHOLE, fleet.caller)) as chunks:
            await anext(chunks)
            with pytest.raises(QuotaExceeded, match="concurrency: limit 1"):
                await fleet.ask(replace(WHOLE, request_id="r2"))
        await fleet.ask(replace(WHOLE, request_id="r3"))

    asyncio.run(body())


def test_a_burst_is_limited() -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0"))
        limited(fleet, Limits(requests_per_minute=60, burst=2))
        await asyncio.gather(*(fleet.ask(replace(WHOLE, request_id=f"r{number}")) for number in range(2)))
        with pytest.raises(QuotaExceeded, match="burst"):
            await fleet.ask(replace(WHOLE, request_id="r3"))

    asyncio.run(body())


def test_a_limit_in_shadow_refuses_nothing() -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0"))
        limited(fleet, Limits(tokens_per_minute=1, shadow=frozenset({Metric.TOKENS_PER_MINUTE})))
        await fleet.ask(WHOLE)
        assert len(await charged(fleet)) == 1

    asyncio.run(body())
