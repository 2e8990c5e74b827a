"""Admission: what a request claims is settled on every path, and what happens while Redis is away."""

from __future__ import annotations

import asyncio
import logging

import pytest

from baton.core.deadline import Deadline
from baton.core.errors import Cancelled, InvalidRequest, Overloaded, QuotaExceeded, StateUnavailable
from baton.core.types import AwayPolicy, Delivered, LedgerReason, Limits
from baton.telemetry.metrics import PrometheusMeter
from gateway.admission import AdmissionPolicy
from tests.unit.gateway.quota_doubles import TURNS, Gate, claim, gate

SOME = Delivered(10, 2, 7)


async def serve(built: Gate, request_id: str, limits: Limits | None = None, delivered: Delivered = SOME) -> bool:
    """Whether it was degraded."""
    async with built.admitted(claim(request_id, limits)) as grant:
        grant.note(delivered)
        return grant.degraded


def test_a_request_is_settled_to_what_was_delivered() -> None:
    async def body() -> None:
        async with gate() as built:
            async with built.admitted(claim("a")) as grant:
                assert await built.reserved() > 0
                grant.note(Delivered(10, 2, 1))
                grant.note(SOME)
            assert await built.reserved() == 0
            (entry,) = await built.ledger()
            assert (entry.input_tokens, entry.cached_tokens, entry.output_tokens) == (10, 2, 7)

    asyncio.run(body())


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), InvalidRequest("x"), Overloaded("late"), asyncio.CancelledError()]
)
def test_a_request_that_fails_half_way_pays_what_it_got(error: BaseException) -> None:
    async def body() -> None:
        async with gate() as built:
            with pytest.raises(type(error)):
                async with built.admitted(claim("a")) as grant:
                    grant.note(SOME)
                    raise error
            assert [entry.output_tokens for entry in await built.ledger()] == [7]
            assert await built.reserved() == 0

    asyncio.run(body())


def test_a_request_that_we_had_no_room_for_pays_nothing() -> None:
    async def body() -> None:
        async with gate() as built:
            with pytest.raises(Overloaded):
                async with built.admitted(claim("a", Limits(requests_per_minute=1))):
                    raise Overloaded("full")
            assert await built.ledger() == []
            await serve(built, "b", Limits(requests_per_minute=1))

    asyncio.run(body())


def test_a_settlement_outlives_the_request_that_was_cancelled_twice() -> None:
    async def body() -> None:
        async with gate() as built:
            entered = asyncio.Event()

            async def request() -> None:
                async with built.admitted(claim("a")) as grant:
                    grant.note(SOME)
                    built.shared.thawed.clear()
                    entered.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(request())
            await entered.wait()
            for _ in range(2):  # the second one meets the settlement
                task.cancel()
                for _ in range(TURNS):
                    await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await built.ledger() == []
            built.shared.thawed.set()
        assert [entry.output_tokens for entry in await built.ledger()] == [7]

    asyncio.run(body())


def test_a_refusal_is_the_quotas_and_nothing_is_left_to_settle() -> None:
    async def body() -> None:
        async with gate() as built:
            with pytest.raises(QuotaExceeded, match="tokens_per_minute"):
                await serve(built, "a", Limits(tokens_per_minute=29))
            assert (built.admission.waiting, await built.ledger()) == (0, [])

    asyncio.run(body())


def test_a_long_request_keeps_its_reservation_and_tells_its_progress() -> None:
    async def body() -> None:
        async with gate(AdmissionPolicy(lease_seconds=15, renew_seconds=5)) as built:
            async with built.admitted(claim("a", Limits(concurrency=1))) as grant:
                grant.note(Delivered(10, 0, 3))
                grant.written()
                await built.pass_time(60)
                with pytest.raises(QuotaExceeded, match="concurrency"):
                    await serve(built, "b", Limits(concurrency=1))
                grant.note(SOME)
            assert [entry.reason for entry in await built.ledger()] == [LedgerReason.SETTLED]

    asyncio.run(body())


def test_a_dead_gateways_reservation_is_ended_by_another_one() -> None:
    async def body() -> None:
        async with gate(AdmissionPolicy(lease_seconds=15)) as built:
            dead = Gate(AdmissionPolicy(lease_seconds=15), built.books, built.clock)
            stream = dead.admitted(claim("a"))
            grant = await stream.__aenter__()
            grant.note(Delivered(10, 0, 4))
            grant.written()
            grant.note(Delivered(10, 0, 5))  # whose write never returned
            await dead.admission._renew()
            await built.pass_time(40)
            assert await built.reserved() == 0
            (entry,) = await built.ledger()
            assert (entry.reason, entry.output_tokens) == (LedgerReason.EXPIRED, 4)

    asyncio.run(body())


def test_a_request_that_went_on_at_another_gateway_ends_here_and_is_charged_there() -> None:
    async def body() -> None:
        async with gate() as built:
            other = Gate(AdmissionPolicy(), built.books, built.clock)
            other.admission._name = "other"
            older, newer, beside = Deadline(None), Deadline(None), Deadline(None)

            async def stream() -> None:
                async with built.admitted(claim("a"), older) as grant:
                    grant.note(Delivered(10, 0, 3))
                    await older.within(asyncio.Event().wait(), "a token")

            streaming = asyncio.create_task(stream())
            async with built.admitted(claim("b"), beside):
                await built.pass_time(0.5)
                async with other.admitted(claim("a"), newer) as grant:
                    await built.pass_time(6)
                    assert streaming.done()
                    with pytest.raises(Cancelled, match="request a was taken over by a later call, at another gateway"):
                        await streaming
                    newer.check("a token")
                    beside.check("a token")
                    grant.note(SOME)
            charged = [(entry.request_id, entry.output_tokens) for entry in await built.ledger()]
            assert charged == [("a", 7), ("b", 0)]

    asyncio.run(body())


# --- while Redis is away ----------------------------------------------------------------------------------------------


def test_each_gateway_admits_its_share_while_the_counters_are_away() -> None:
    limits = Limits(requests_per_minute=9, tokens_per_day=10_000)

    async def body() -> None:
        async with gate(replicas=4) as built:
            await built.lose()
            assert [await serve(built, f"a{number}", limits) for number in range(2)] == [True, True]
            with pytest.raises(QuotaExceeded, match="limit 2, used 2"):
                await serve(built, "b", limits)
            assert await built.ledger() == []

    asyncio.run(body())


def test_the_policy_closed_refuses_with_an_outage_and_no_quota_code() -> None:
    async def body() -> None:
        async with gate() as built:
            await built.lose()
            with pytest.raises(StateUnavailable, match=r"'acme'.*policy is closed"):
                async with built.admitted(claim("a", away=AwayPolicy.CLOSED)):
                    raise AssertionError("admitted")
            async with built.admitted(claim("a", Limits(concurrency=0), away=AwayPolicy.OPEN)) as grant:
                assert grant.degraded

    asyncio.run(body())


def test_no_request_asks_for_counters_that_are_known_to_be_away() -> None:
    async def body() -> None:
        async with gate() as built:
            await built.lose()
            before = built.shared.calls
            for number in range(5):
                await serve(built, f"a{number}")
            assert built.shared.calls == before

    asyncio.run(body())


def test_one_answer_that_many_wait_for_in_vain_is_no_outage() -> None:
    async def body() -> None:
        async with gate() as built:
            built.shared.thawed.clear()
            waiting = [asyncio.create_task(serve(built, f"a{number}")) for number in range(20)]
            for _ in range(TURNS):
                await asyncio.sleep(0)
            built.clock.advance(0.05)
            built.shared.is_away = True
            built.shared.thawed.set()
            await asyncio.sleep(0)
            built.shared.is_away = False
            assert any([*await asyncio.gather(*waiting)])
            assert not built.admission.degraded

    asyncio.run(body())


def test_an_outage_is_reconciled_before_the_shared_counters_decide_again() -> None:
    limits = Limits(tokens_per_day=100)

    async def body() -> None:
        async with gate() as built:
            async with built.admitted(claim("before", limits)) as grant:
                grant.note(SOME)
                await built.lose()
            for number in range(3):
                await serve(built, f"a{number}", limits)
            assert await built.ledger() == []
            built.shared.is_away = False
            await built.pass_time(2)
            assert not built.admission.degraded
            reasons = {entry.request_id: entry.reason for entry in await built.ledger()}
            assert reasons == {
                "before": LedgerReason.SETTLED,
                **dict.fromkeys(("a0", "a1", "a2"), LedgerReason.UNRESERVED),
            }
            with pytest.raises(QuotaExceeded, match="limit 100, used 68"):
                async with built.admitted(claim("too much", limits, tokens=(10, 23))):
                    pass

    asyncio.run(body())


def test_an_answer_that_is_lost_charges_nobody_twice() -> None:
    async def body() -> None:
        async with gate() as built:
            built.shared.is_deaf = True
            assert await serve(built, "a")
            assert await serve(built, "b")
            built.shared.is_deaf = False
            await built.pass_time(3)
            assert sorted(entry.request_id for entry in await built.ledger()) == ["a", "b"]
            assert await built.reserved() == 0

    asyncio.run(body())


def test_what_may_be_reserved_for_a_request_that_was_refused_here_is_given_back() -> None:
    async def body() -> None:
        async with gate() as built:
            built.shared.is_deaf = True
            with pytest.raises(StateUnavailable):
                async with built.admitted(claim("a", away=AwayPolicy.CLOSED)):
                    raise AssertionError("admitted")
            assert await built.reserved() > 0
            built.shared.is_deaf = False
            await built.pass_time(1)
            assert (await built.reserved(), await built.ledger()) == (0, [])

    asyncio.run(body())


def test_a_settlement_that_may_have_arrived_long_ago_is_not_sent_again() -> None:
    async def body() -> None:
        async with gate(AdmissionPolicy(remember_seconds=60)) as built:
            async with built.admitted(claim("a")) as grant:
                grant.note(SOME)
                built.shared.is_deaf = True
            built.shared.is_deaf, built.shared.is_away = False, True
            await built.pass_time(100)
            assert built.admission.degraded
            built.shared.is_away = False
            await built.pass_time(2)
            assert (built.admission.waiting, len(await built.ledger())) == (0, 1)

    asyncio.run(body())


def test_an_outage_is_two_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with gate() as built:
            await built.lose()
            for number in range(20):
                await serve(built, f"a{number}")
            await built.pass_time(30)
            built.shared.is_away = False
            await built.pass_time(2)

    caplog.set_level(logging.INFO, logger="gateway.admission")
    asyncio.run(body())
    assert [record.getMessage() for record in caplog.records] == [
        "quota counters are away, each tenant's policy decides",
        "quota counters are back",
    ]


def test_settlements_that_wait_are_bounded() -> None:
    async def body() -> None:
        async with gate(AdmissionPolicy(kept_settlements=5)) as built:
            await built.lose()
            for number in range(9):
                await serve(built, f"a{number}")
            assert built.admission.waiting == 5
            built.shared.is_away = False
            await built.pass_time(2)
            assert [entry.request_id for entry in await built.ledger()] == ["a4", "a5", "a6", "a7", "a8"]

    asyncio.run(body())


def test_what_waits_is_told_when_the_gateway_ends() -> None:
    async def body() -> None:
        async with gate() as built:
            await built.lose()
            await serve(built, "a")
            built.shared.is_away = False
        assert [entry.request_id for entry in await built.ledger()] == ["a"]

    asyncio.run(body())


def test_who_waited_for_redis_in_vain_to_be_admitted_does_not_wait_for_it_at_the_end_again() -> None:
    async def body() -> None:
        async with gate() as built:
            built.shared.is_away = True
            async with built.admitted(claim("a")) as grant:
                grant.note(SOME)
                asked = built.shared.calls
            assert (built.shared.calls, built.admission.waiting) == (asked, 1)
            assert not built.admission.degraded
            built.shared.is_away = False
            await built.pass_time(1)
            assert [entry.request_id for entry in await built.ledger()] == ["a"]

    asyncio.run(body())


def test_what_is_admitted_without_the_shared_counters_is_counted_by_its_policy() -> None:
    async def body() -> None:
        meter = PrometheusMeter()
        async with gate(meter=meter) as built:
            await serve(built, "shared")
            await built.lose()
            await serve(built, "a")
            with pytest.raises(QuotaExceeded):
                await serve(built, "b", Limits(requests_per_minute=0))
        name = "baton_quota_degraded_admissions_total"
        lines = [line for line in meter.exposition().decode().splitlines() if line.startswith(name)]
        assert sorted(lines) == [f'{name}{{policy="bounded_local"}} 1.0', f'{name}{{policy="open"}} 3.0']

    asyncio.run(body())
