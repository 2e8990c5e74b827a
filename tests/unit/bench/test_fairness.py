"""A bronze tenant that floods an engine, exactly: fixed steps of the fake model on a controlled clock."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.core.types import Tier
from baton.engine.config import EngineConfig
from baton.engine.sequence import Work
from baton.engine.tiers import parse_tiers
from bench.fairness import CROWD, ENGINE_SETTINGS, STEADY, FairnessTrial
from bench.tenant_load import TenantLoad, jain, quantile

CONFIG = EngineConfig(**ENGINE_SETTINGS)  # type: ignore[arg-type]
NO_TIERS = replace(CONFIG, tiers=("gold=1:0:1000", "silver=1:0:1000", "bronze=1:0:1000"))


@pytest.mark.parametrize(("work", "steps_ahead"), [(Work.DECODE, 0), (Work.DECODE, 1), (Work.PREFILL, 0)])
def test_a_flooding_bronze_tenant_hurts_nobody(work: Work, steps_ahead: int) -> None:
    """Gold's p99 to the first token rises by a tenth at most, bronze tenants share evenly, and nobody, not even the one
    that floods, waits past its tier's bound."""
    found = FairnessTrial(CONFIG, work, seconds=20, seed=1).on_fake(steps_ahead=steps_ahead)
    assert found.ttft_crowded <= 1.1 * found.ttft_alone
    assert found.jain >= 0.95
    tiers, policies = {load.name: load.tier for load in STEADY[work] + CROWD[work]}, parse_tiers(())
    for tenant, wait in found.longest_wait.items():
        assert wait <= policies[tiers[tenant]].bound_seconds, tenant
    assert found.crowded["gold"].refused == found.crowded["silver"].refused == 0
    assert found.crowded["bronze-flood"].refused > 0


def test_without_tiers_the_same_flood_hurts_gold() -> None:
    found = FairnessTrial(NO_TIERS, Work.DECODE, seconds=10, seed=1).on_fake(steps_ahead=0)
    assert found.ttft_crowded > 2 * found.ttft_alone


def test_the_figures_are_the_same_each_time() -> None:
    once, again = (FairnessTrial(CONFIG, Work.PREFILL, seconds=3, seed=2).on_fake(steps_ahead=0) for _ in range(2))
    assert once == again


def test_the_load_is_what_it_says() -> None:
    gold, flood = STEADY[Work.DECODE][0], CROWD[Work.DECODE][0]
    assert flood.rate == 10 * gold.rate
    arrivals = list(TenantLoad("a", Tier.GOLD, 5.0, 1, 1).arrivals(1000.0, 1))
    assert arrivals == sorted(arrivals)
    assert abs(len(arrivals) / 5000 - 1) < 0.1


def test_jain_and_quantile() -> None:
    assert jain([3, 3, 3]) == 1
    assert jain([1, 0, 0, 0]) == 0.25
    assert math.isnan(jain([0, 0]))
    assert [quantile([4, 1, 3, 2], share) for share in (0, 0.5, 0.75, 0.99)] == [1, 2, 3, 4]
    assert math.isnan(quantile([], 0.5))
