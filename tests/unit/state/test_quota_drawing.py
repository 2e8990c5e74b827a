"""Plans of claims: made once for an account and a model, and anew only when the account changes."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace

import pytest

from baton.core.types import Account, KeyRecord, Limits, Metric, ModelLimits, Organisation, Tenant
from baton.state.quota import drawing
from baton.state.quota.drawing import KNOWN_DRAWINGS, Drawing, Drawings
from baton.state.quota.windows import Calendar

ALL = Limits(1, 2, 3, 4, 5, 6, 7, 8)
NOW = Calendar().windows("UTC", "UTC", 1_764_417_600_000_000)


def account(key: str = "k", limits: Limits = ALL) -> Account:
    return Account(
        Organisation("umbrella", limits), Tenant("acme", "umbrella", limits=limits), KeyRecord(key, "acme", "", "")
    )


def plan_of(drawing: Drawing) -> bytes:
    return drawing.packed(NOW).plan


def test_a_plan_is_made_once_for_an_account() -> None:
    drawings = Drawings("baton")
    first = drawings.of(account(), "m")
    assert drawings.of(account(), "m") is first, "an equal account is the same one"


def test_a_plan_is_made_anew_when_a_limit_changes() -> None:
    drawings = Drawings("baton")
    first = drawings.of(account(), "m")
    changed = drawings.of(account(limits=replace(ALL, tokens_per_day=50)), "m")
    assert plan_of(changed) != plan_of(first)
    assert plan_of(drawings.of(account(), "m")) == plan_of(first)


def test_each_model_has_a_plan_of_its_own() -> None:
    rule = ModelLimits("large", Limits(requests_per_minute=1))
    payer = replace(account(), tenant=Tenant("acme", "umbrella", model_limits=(rule,)))
    drawings = Drawings("baton")
    large, small = drawings.of(payer, "large"), drawings.of(payer, "small")
    assert [bucket.scope.model for bucket in large.buckets] == ["", "", "large"]
    assert [bucket.scope.model for bucket in small.buckets] == ["", ""]


def test_shadowed_limits_are_counted_and_not_enforced() -> None:
    enforced = Drawings("baton").of(account(limits=Limits(requests_per_minute=9)), "m")
    shadowed = Drawings("baton").of(
        account(limits=Limits(requests_per_minute=9, shadow=frozenset({Metric.REQUESTS_PER_MINUTE}))), "m"
    )
    assert (enforced.has_shadow, shadowed.has_shadow) == (False, True)
    assert len(plan_of(enforced)) == len(plan_of(shadowed))
    assert plan_of(enforced) != plan_of(shadowed)


def test_the_plan_unused_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "KNOWN_DRAWINGS", 2)
    drawings = Drawings("baton")
    a, b = drawings.of(account("a"), "m"), drawings.of(account("b"), "m")
    assert drawings.of(account("a"), "m") is a
    drawings.of(account("c"), "m")
    assert drawings.of(account("a"), "m") is a
    assert drawings.of(account("b"), "m") is not b


def test_all_plans_that_are_kept_stay_within_80_megabytes() -> None:
    """Each with all limits on three levels; accounts apart, which are their owner's."""
    payers = [replace(account(), key=KeyRecord(f"key-{number}", "acme", "", "", limits=ALL)) for number in range(500)]
    drawings = Drawings("baton")
    gc.collect()
    tracemalloc.start()
    try:
        for payer in payers:
            drawings.of(payer, "m")
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held / len(payers) * KNOWN_DRAWINGS < 80e6
