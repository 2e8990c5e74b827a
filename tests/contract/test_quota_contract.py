"""One suite for all quotas: what is reserved, refused, settled, refunded and remembered."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidRequest, QuotaExceeded
from baton.core.types import (
    Delivered,
    LedgerExtent,
    LedgerReason,
    Level,
    Limits,
    Metric,
    ModelLimits,
    Prices,
    SettleOutcome,
    ledger_position,
)
from tests.contract.quota_worlds import (
    InWorlds,
    World,
    account,
    claim,
    owned_by,
    standing,
)

TOKENS = Limits(tokens_per_day=100)


def test_a_reservation_holds_prompt_and_most_output_and_a_settlement_refunds_the_rest(
    in_each_world: InWorlds,
) -> None:
    payer = account(TOKENS)

    async def body(world: World) -> None:
        order = claim(payer, tokens=(10, 20))
        grant = await world.quota.reserve(order)
        day = next(b for b in grant.balances if b.metric is Metric.TOKENS_PER_DAY)
        assert (day.limit, day.used, day.reserved, day.remaining) == (100, 0, 30, 70)
        assert await standing(world, payer) == {
            "tenant/tokens_per_day": (0, 30),
            "tenant/tokens_per_month": (0, 30),
            "tenant/concurrency": (0, 1),
        }
        assert await world.quota.settle(order, Delivered(10, 0, 7)) is SettleOutcome.SETTLED
        assert await standing(world, payer) == {
            "tenant/tokens_per_day": (17, 0),
            "tenant/tokens_per_month": (17, 0),
            "tenant/concurrency": (0, 0),
        }

    in_each_world(body)


MINUTES = Limits(
    requests_per_minute=2, input_tokens_per_minute=25, output_tokens_per_minute=45, tokens_per_minute=70, concurrency=2
)


@pytest.mark.parametrize(
    ("limits", "metric", "figures"),
    [
        (Limits(requests_per_minute=2), Metric.REQUESTS_PER_MINUTE, (2, 0, 2, 1)),
        (Limits(input_tokens_per_minute=25), Metric.INPUT_TOKENS_PER_MINUTE, (25, 0, 20, 10)),
        (Limits(output_tokens_per_minute=59), Metric.OUTPUT_TOKENS_PER_MINUTE, (59, 0, 40, 20)),
        (Limits(tokens_per_minute=89), Metric.TOKENS_PER_MINUTE, (89, 0, 60, 30)),
        (Limits(tokens_per_day=89), Metric.TOKENS_PER_DAY, (89, 0, 60, 30)),
        (Limits(tokens_per_month=89), Metric.TOKENS_PER_MONTH, (89, 0, 60, 30)),
        (Limits(concurrency=2), Metric.CONCURRENCY, (2, 0, 2, 1)),
        (Limits(requests_per_minute=100, burst=2), Metric.BURST, (2, 2, 0, 1)),
    ],
    ids=lambda value: str(value) if isinstance(value, Metric) else "",
)
@pytest.mark.parametrize("level", list(Level))
def test_each_limit_refuses_at_each_level_and_explains_itself(
    in_each_world: InWorlds, level: Level, limits: Limits, metric: Metric, figures: tuple[int, int, int, int]
) -> None:
    payer = account(**{level.name.lower(): limits})  # pyright: ignore[reportArgumentType]

    async def body(world: World) -> None:
        for number in range(2):
            await world.quota.reserve(claim(payer, f"req-{number}"))
        before = await standing(world, payer)
        with pytest.raises(QuotaExceeded) as caught:
            await world.quota.reserve(claim(payer, "req-2"))
        (refusal,) = caught.value.refusals
        assert (refusal.level, refusal.metric) == (level, metric)
        assert refusal.subject == {"organization": "umbrella", "tenant": "acme", "key": "k1"}[level]
        assert (refusal.limit, refusal.used, refusal.reserved, refusal.requested) == figures
        assert refusal.retry_after is not None and refusal.retry_after > 0
        assert str(refusal) == caught.value.message
        after = await standing(world, payer)
        assert {name: value for name, value in after.items() if "burst" not in name} == {
            name: value for name, value in before.items() if "burst" not in name
        }, "a refusal burns nothing"

    in_each_world(body)


def test_a_refusal_by_one_limit_burns_no_other(in_each_world: InWorlds) -> None:
    """FAILURES 41: the key's limit comes last, after buckets of the organisation and the tenant had room."""
    payer = account(MINUTES, organisation=MINUTES, key=Limits(tokens_per_minute=29))

    async def body(world: World) -> None:
        with pytest.raises(QuotaExceeded, match="key 'k1'"):
            await world.quota.reserve(claim(payer))
        assert set((await standing(world, payer)).values()) == {(0, 0)}
        assert list(await world.ledger.entries("umbrella")) == []

    in_each_world(body)


def test_a_claim_larger_than_the_limit_is_told_that_it_never_fits(in_each_world: InWorlds) -> None:
    payer = account(Limits(tokens_per_minute=29, requests_per_minute=0))

    async def body(world: World) -> None:
        with pytest.raises(QuotaExceeded, match="can never fit") as caught:
            await world.quota.reserve(claim(payer))
        assert caught.value.retry_after is None
        assert len(caught.value.refusals) == 2

    in_each_world(body)


def test_a_models_limit_holds_for_that_model_only(in_each_world: InWorlds) -> None:
    payer = account(models=(ModelLimits("big", Limits(requests_per_minute=1)),))

    async def body(world: World) -> None:
        await world.quota.reserve(claim(payer, "a", model="big"))
        await world.quota.reserve(claim(payer, "b", model="small"))
        with pytest.raises(QuotaExceeded, match="for model 'big'"):
            await world.quota.reserve(claim(payer, "c", model="big"))

    in_each_world(body)


def test_tenants_of_an_organisation_share_its_limits_and_not_their_own(in_each_world: InWorlds) -> None:
    shared, own = Limits(tokens_per_day=100), Limits(concurrency=1)
    first = account(own, organisation=shared, name="acme")
    second = account(own, organisation=shared, name="zeta")

    async def body(world: World) -> None:
        await world.quota.reserve(claim(first, tokens=(10, 50)))
        await world.quota.reserve(claim(second, tokens=(10, 20)))
        third = account(organisation=shared, name="third")
        with pytest.raises(QuotaExceeded, match=r"organization 'umbrella': tokens_per_day: limit 100.*reserved 90"):
            await world.quota.reserve(claim(third, tokens=(10, 1)))

    in_each_world(body)


def test_levels_that_count_different_things_are_not_mixed_up(in_each_world: InWorlds) -> None:
    first = account(TOKENS, organisation=Limits(concurrency=9), key=Limits(concurrency=9))
    second = account(TOKENS, organisation=Limits(concurrency=9), key=Limits(concurrency=9), key_id="k2")
    third = account(organisation=Limits(concurrency=9), name="zeta", key_id="k3")

    async def body(world: World) -> None:
        for number, payer in enumerate((first, first, second, third)):
            grant = await world.quota.reserve(claim(payer, f"req-{number}"))
            running = {b.level: b.reserved for b in grant.balances if b.metric is Metric.CONCURRENCY}
            assert running == {level: held for level, held in expected[number].items() if level in running}
        assert (await standing(world, first))["organization/concurrency"] == (0, 4)
        assert (await standing(world, first))["tenant/concurrency"] == (0, 3)
        assert (await standing(world, first))["key/concurrency"] == (0, 2)

    expected = [
        {Level.ORGANISATION: 1, Level.TENANT: 1, Level.KEY: 1},
        {Level.ORGANISATION: 2, Level.TENANT: 2, Level.KEY: 2},
        {Level.ORGANISATION: 3, Level.TENANT: 3, Level.KEY: 1},
        {Level.ORGANISATION: 4, Level.TENANT: 1, Level.KEY: 1},
    ]
    in_each_world(body)


def test_a_settlement_counts_once(in_each_world: InWorlds) -> None:
    payer = account(TOKENS)

    async def body(world: World) -> None:
        order = claim(payer)
        await world.quota.reserve(order)
        assert await world.quota.settle(order, Delivered(10, 4, 5)) is SettleOutcome.SETTLED
        assert await world.quota.settle(order, Delivered(10, 4, 9)) is SettleOutcome.ALREADY
        assert await world.quota.release(order) is SettleOutcome.ALREADY
        assert (await standing(world, payer))["tenant/tokens_per_day"] == (15, 0)
        (entry,) = await world.ledger.entries("umbrella")
        assert (entry.requests, entry.input_tokens, entry.cached_tokens, entry.output_tokens) == (1, 10, 4, 5)

    in_each_world(body)


@pytest.mark.parametrize("is_released", [False, True])
def test_a_reserve_that_arrives_after_its_own_end_changes_nothing(in_each_world: InWorlds, is_released: bool) -> None:
    async def body(world: World) -> None:
        payer = account(Limits(tokens_per_day=1_000, concurrency=1))
        order = claim(payer)
        if is_released:
            await world.quota.release(order)
        else:
            assert await world.quota.settle(order, Delivered(10, 0, 5)) is SettleOutcome.SETTLED
        before = await world.ledger.entries("umbrella"), await standing(world, payer)
        with pytest.raises(InvalidRequest, match="this admission of 'req-1' has ended"):
            await world.quota.reserve(order)
        assert (await world.ledger.entries("umbrella"), await standing(world, payer)) == before
        again = await world.quota.reserve(owned_by(order, "another"))
        assert not again.taken_over

    in_each_world(body)


def test_a_reserve_that_arrives_after_its_own_end_takes_nobody_elses_over(in_each_world: InWorlds) -> None:
    """Whether the other one's reserve came after that end or before it."""

    async def body(world: World) -> None:
        order = claim(account(Limits(concurrency=1)))
        early, other, late = order, owned_by(order, "other"), owned_by(order, "late")
        await world.quota.release(early)
        await world.quota.reserve(other)
        assert await world.quota.release(late) is SettleOutcome.SUPERSEDED
        for each in (early, late):
            with pytest.raises(InvalidRequest, match="this admission of 'req-1' has ended"):
                await world.quota.reserve(each)
        assert await world.quota.settle(other, Delivered(10, 0, 5)) is SettleOutcome.SETTLED

    in_each_world(body)


def test_a_released_claim_leaves_no_trace(in_each_world: InWorlds) -> None:
    payer = account(MINUTES)

    async def body(world: World) -> None:
        order = claim(payer)
        await world.quota.reserve(order)
        assert await world.quota.release(order) is SettleOutcome.SETTLED
        assert set((await standing(world, payer)).values()) == {(0, 0)}
        assert list(await world.ledger.entries("umbrella")) == []
        assert await world.quota.settle(order, Delivered(10, 0, 5)) is SettleOutcome.ALREADY

    in_each_world(body)


def test_the_ledger_says_who_used_what_at_which_cost(in_each_world: InWorlds) -> None:
    payer = account()
    prices = Prices(input=150_000, cached=37_500, output=600_000, joule=27_778)

    async def body(world: World) -> None:
        order = claim(payer, prices=prices, model="org/model:7b")
        await world.quota.reserve(order)
        await world.quota.settle(order, Delivered(10, 4, 5, energy_millijoules=2_500))
        (entry,) = await world.ledger.entries("umbrella")
        assert (entry.request_id, entry.tenant, entry.key_id, entry.model) == ("req-1", "acme", "k1", "org/model:7b")
        assert entry.cost == 6 * 150_000 + 4 * 37_500 + 5 * 600_000 + 69_445
        assert (entry.energy_millijoules, entry.reason) == (2_500, LedgerReason.SETTLED)

    in_each_world(body)


def test_ledger_pages_follow_each_other_and_trimming_forgets_what_was_read(in_each_world: InWorlds) -> None:
    payer = account()

    async def body(world: World) -> None:
        for number in range(5):
            order = claim(payer, f"req-{number}")
            await world.quota.reserve(order)
            await world.quota.settle(order, Delivered(1, 0, number))
        assert [name async for name in world.ledger.organisations()] == ["umbrella"]
        first = await world.ledger.entries("umbrella", limit=2)
        assert await world.ledger.extent("umbrella") == LedgerExtent(5, first[0].id, 0)
        rest = await world.ledger.entries("umbrella", after=first[-1].id)
        assert [entry.output_tokens for entry in [*first, *rest]] == [0, 1, 2, 3, 4]
        await world.ledger.trim("umbrella", first[-1].id)
        assert list(await world.ledger.entries("umbrella")) == list(rest)
        until = ledger_position(first[-1].id)[0]
        assert await world.ledger.extent("umbrella") == LedgerExtent(3, rest[0].id, until)
        await world.ledger.trim("umbrella", f"{until - 1}-0")
        assert (await world.ledger.extent("umbrella")).trimmed == until, "what is gone stays gone"
        assert list(await world.ledger.entries("nobody")) == []
        assert await world.ledger.extent("nobody") == LedgerExtent(0, "", 0)

    in_each_world(body)


# --- rules that watch -------------------------------------------------------------------------------------------------


def test_a_shadowed_rule_counts_and_tells_but_refuses_nothing(in_each_world: InWorlds) -> None:
    shadow = frozenset({Metric.TOKENS_PER_DAY, Metric.CONCURRENCY, Metric.BURST})
    payer = account(
        Limits(tokens_per_day=40, concurrency=1, requests_per_minute=10, burst=1, shadow=shadow),
    )

    async def body(world: World) -> None:
        assert (await world.quota.reserve(claim(payer, "a"))).shadowed == ()
        shadowed = (await world.quota.reserve(claim(payer, "b"))).shadowed
        assert {refusal.metric for refusal in shadowed} == shadow
        assert (await standing(world, payer))["tenant/tokens_per_day"] == (0, 60)

    in_each_world(body)


def test_an_alert_comes_once_a_window_at_each_threshold(in_each_world: InWorlds) -> None:
    payer = account(TOKENS)

    async def body(world: World) -> None:
        for number, output in enumerate((49, 1, 1, 29, 1, 19)):
            order = claim(payer, f"req-{number}", tokens=(0, output))
            await world.quota.reserve(order)
            await world.quota.settle(order, Delivered(0, 0, output))
        alerts = await world.ledger.alerts("umbrella")
        assert [(a.level, a.subject, a.metric, a.percent, a.limit, a.used) for a in alerts] == [
            (Level.TENANT, "acme", Metric.TOKENS_PER_DAY, percent, 100, used)
            for percent, used in ((50, 50), (80, 80), (100, 100))
        ]
        assert await world.ledger.alerts("umbrella", limit=2) == alerts[:2]
        assert await world.ledger.alerts("umbrella", after=alerts[0].id) == alerts[1:]

    in_each_world(body)


def test_the_first_refusal_for_a_day_alerts_that_it_is_used_up(in_each_world: InWorlds) -> None:
    payer = account(TOKENS)

    async def body(world: World) -> None:
        await world.quota.reserve(claim(payer, "a", tokens=(0, 95)))
        for name in "bc":
            with pytest.raises(QuotaExceeded):
                await world.quota.reserve(claim(payer, name, tokens=(0, 6)))
        assert [(alert.percent, alert.used) for alert in await world.ledger.alerts("umbrella")] == [(100, 0)]

    in_each_world(body)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"model": ""}, "model"),
        ({"tokens": (-1, 5)}, "input_tokens"),
        ({"tokens": (1, 10**13)}, "output_tokens"),
    ],
)
def test_a_claim_that_makes_no_sense_is_refused_by_name(
    in_each_world: InWorlds, change: dict[str, object], named: str
) -> None:
    async def body(world: World) -> None:
        with pytest.raises(InvalidRequest, match=named):
            await world.quota.reserve(claim(account(), **change))  # pyright: ignore[reportArgumentType]

    in_each_world(body)
