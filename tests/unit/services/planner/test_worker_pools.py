"""Workers that are kept for a tenant or a tier: its requests go there and nowhere else, and nobody else's do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.errors import ConfigError, Overloaded
from baton.core.pools import known_pools, parse_pools
from baton.core.types import Plan, PlanQuery, ProcessRecord, Role, Tier
from services.decode.config import DecodeConfig
from services.planner.config import PlannerConfig
from tests.unit.services.planner.test_placement_policy import QUERY, decide, fleet, worker

POOLS = PlannerConfig(pools=("tenant:acme=acme-only", "tier:gold=fast"))


def labelled(name: str, *labels: str, role: Role = Role.DECODE) -> ProcessRecord:
    return replace(worker(name, role), labels=labels)


WORKERS = (
    labelled("acme-d", "acme-only"),
    labelled("acme-p", "acme-only", role=Role.PREFILL),
    labelled("fast-d", "fast", "h200"),
    labelled("d", "h200"),
    labelled("p", role=Role.PREFILL),
)


def chosen(plan: Plan) -> tuple[list[str], list[str]]:
    return [one.worker_id for one in plan.decode], [one.worker_id for one in plan.prefill]


def asked_by(tenant: str, tier: Tier = Tier.BRONZE) -> PlanQuery:
    return replace(QUERY, tenant=tenant, tier=tier)


@pytest.mark.parametrize(
    ("query", "decode", "prefill"),
    [
        pytest.param(asked_by("acme"), ["acme-d"], ["acme-p"], id="its own pool"),
        pytest.param(asked_by("acme", Tier.GOLD), ["acme-d"], ["acme-p"], id="its own before its tier's"),
        pytest.param(asked_by("zeta", Tier.GOLD), ["fast-d"], [], id="its tier's"),
        pytest.param(asked_by("zeta"), ["d"], ["p"], id="a label that no pool is made of means nothing"),
    ],
)
def test_a_request_goes_to_its_pool_and_to_no_other(query: PlanQuery, decode: list[str], prefill: list[str]) -> None:
    plan = decide(fleet(*WORKERS), query, POOLS)
    assert chosen(plan) == (decode, prefill)
    assert ("dedicated_pool" in plan.reasons) == (decode != ["d"])


@pytest.mark.parametrize(
    ("tenant", "workers", "where"),
    [("acme", WORKERS[2:], "in the pool 'acme-only'"), ("zeta", WORKERS[:3], "outside the dedicated pools")],
)
def test_an_empty_pool_is_overloaded_and_does_not_spill_over(
    tenant: str, workers: tuple[ProcessRecord, ...], where: str
) -> None:
    with pytest.raises(Overloaded, match=where) as caught:
        decide(fleet(*workers), asked_by(tenant), POOLS)
    assert caught.value.retry_after == POOLS.retry_after_seconds


@pytest.mark.parametrize("entries", [("tenant:acme=acme-only", "tier:gold=fast"), ("fast", "acme-only")])
def test_the_pool_that_a_tenants_record_names_goes_before_the_map_and_may_be_kept_for_it(
    entries: tuple[str, ...],
) -> None:
    config = PlannerConfig(pools=entries)
    recorded = replace(asked_by("acme", Tier.GOLD), pool="fast")
    plan = decide(fleet(*WORKERS), recorded, config)
    assert chosen(plan) == (["fast-d"], [])
    assert "dedicated_pool" in plan.reasons
    assert chosen(decide(fleet(*WORKERS), asked_by("zeta"), config)) == (["d"], ["p"])


def test_a_pool_of_which_nobody_has_heard_is_an_empty_one() -> None:
    with pytest.raises(Overloaded, match="in the pool 'nowhere'"):
        decide(fleet(*WORKERS), replace(asked_by("acme"), pool="nowhere"), POOLS)


def test_a_plan_says_that_the_tenant_is_held_to_its_blocks() -> None:
    assert "tenant_block_cap" in decide(fleet(*WORKERS), replace(asked_by("acme"), tenant_max_blocks=8), POOLS).reasons
    assert "tenant_block_cap" not in decide(fleet(*WORKERS), asked_by("acme"), POOLS).reasons


def test_without_a_map_labels_mean_nothing() -> None:
    assert sorted(chosen(decide(fleet(*WORKERS), asked_by("acme")))[0]) == ["acme-d", "d", "fast-d"]


@pytest.mark.parametrize(
    "entry",
    ["acme=x", "tenant:=x", "tenant:acme=", "tier:lead=x", "tenant:acme=a b", "tier:gold", "tier:silver=-x", "a b"],
)
def test_an_entry_that_is_none_is_refused_by_name(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"planner\.pools must hold entries tenant:NAME=LABEL") as caught:
        PlannerConfig(pools=("tier:gold=fast", entry))
    assert entry in caught.value.message


def test_a_tenant_or_tier_has_one_pool() -> None:
    for twice in (("tenant:a=x", "tenant:a=y"), ("tier:gold=x", "tier:gold=y")):
        with pytest.raises(ConfigError, match="each tenant and tier once"):
            PlannerConfig(pools=twice)


def test_a_tenants_name_may_hold_any_character() -> None:
    assert parse_pools(("tenant:a=b:c=pool",)).label_for(asked_by("a=b:c")) == "pool"


def test_a_newer_planners_entries_are_passed_over() -> None:
    assert known_pools(("region:eu=x", "tier:gold=fast")) == parse_pools(("tier:gold=fast",))


def test_workers_and_planners_register_what_others_must_know() -> None:
    plain = ProcessRecord("w", Role.DECODE, "w:1", 1, 1)
    assert DecodeConfig(labels=("fast",)).described(plain).labels == ("fast",)
    assert POOLS.described(plain).pools == POOLS.pools
    with pytest.raises(ConfigError, match=r"decode\.labels must hold labels"):
        DecodeConfig(labels=("a label",))
