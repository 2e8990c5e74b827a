"""What organisations, tenants and keys may look like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import InvalidRequest, QuotaExceeded
from baton.core.tenancy import allows_model, check_key, check_organisation, check_tenant
from baton.core.types import (
    Account,
    KeyRecord,
    Level,
    Limits,
    Metric,
    ModelLimits,
    Organisation,
    QuotaRefusal,
    Tenant,
)

ORGANISATION = Organisation("umbrella", Limits(tokens_per_day=0), (ModelLimits("a/b:c", Limits(concurrency=3)),))
TENANT = Tenant(
    "acme-2.eu", "umbrella", models=("m",), time_zone="Europe/Berlin", sharing_group="group", pool="H200.eu"
)
KEY = KeyRecord("k1", "acme-2.eu", "k1.abcd", "00", created_at=5.0, expires_at=6.0)


def test_what_makes_sense_is_accepted() -> None:
    check_organisation(ORGANISATION)
    check_tenant(replace(TENANT, limits=Limits(requests_per_minute=5, burst=5, shadow=frozenset({Metric.BURST}))))
    check_key(KEY)


@pytest.mark.parametrize(
    ("check", "thing", "change", "named"),
    [
        (check_organisation, ORGANISATION, {"name": ""}, "organisation.name"),
        (check_organisation, ORGANISATION, {"time_zone": "Mars/Olympus"}, "organisation.time_zone.*Mars"),
        (check_organisation, ORGANISATION, {"time_zone": "../../etc/passwd"}, "organisation.time_zone"),
        (check_tenant, TENANT, {"name": "{x}"}, "tenant.name"),
        (check_tenant, TENANT, {"name": "a:b"}, "tenant.name"),
        (check_tenant, TENANT, {"name": "a\n"}, "tenant.name"),
        (check_tenant, TENANT, {"name": "a*"}, "tenant.name"),
        (check_tenant, TENANT, {"name": "x" * 64}, "tenant.name"),
        (check_tenant, TENANT, {"organisation": "A"}, "tenant.organisation"),
        (check_tenant, TENANT, {"sharing_group": "a b"}, "tenant.sharing_group"),
        (check_tenant, TENANT, {"max_kv_blocks": 0}, "tenant.max_kv_blocks.*from 1.*got 0"),
        (check_tenant, TENANT, {"max_kv_blocks": 2**31}, "tenant.max_kv_blocks.*2147483648"),
        (check_tenant, TENANT, {"pool": "a pool"}, "tenant.pool.*'a pool'"),
        (check_tenant, TENANT, {"pool": "x" * 64}, "tenant.pool"),
        (check_tenant, TENANT, {"models": ("ok", "")}, r"tenant.models\[1\]"),
        (check_tenant, TENANT, {"limits": Limits(tokens_per_day=-1)}, "tenant.limits.tokens_per_day.*-1"),
        (check_tenant, TENANT, {"limits": Limits(concurrency=10**13)}, "tenant.limits.concurrency.*10000000000000"),
        (check_tenant, TENANT, {"limits": Limits(burst=5)}, "tenant.limits.burst"),
        (check_tenant, TENANT, {"limits": Limits(requests_per_minute=0, burst=5)}, "tenant.limits.burst"),
        (check_tenant, TENANT, {"limits": Limits(requests_per_minute=1, burst=0)}, "tenant.limits.burst"),
        (check_tenant, TENANT, {"limits": Limits(shadow=frozenset({Metric.CONCURRENCY}))}, "shadow.*concurrency"),
        (check_tenant, TENANT, {"model_limits": (ModelLimits("m", Limits()),) * 2}, "model_limits.*once"),
        (check_tenant, TENANT, {"model_limits": (ModelLimits("a\tb", Limits()),)}, "model_limits"),
        (check_key, KEY, {"id": "a.b"}, "key.id.*dot"),
        (check_key, KEY, {"priority": 101}, "key.priority.*101"),
        (check_key, KEY, {"expires_at": 5.0}, "key.expires_at"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    check: Callable[[Any], None], thing: Any, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        check(replace(thing, **change))


def test_a_model_needs_the_tenant_and_the_key() -> None:
    account = Account(ORGANISATION, replace(TENANT, models=("a", "b")), replace(KEY, models=("b", "c")))
    assert [allows_model(account, model) for model in "abcd"] == [False, True, False, False]
    assert allows_model(replace(account, key=KEY), "a")


def test_a_refusal_tells_of_the_limit_that_lasts_longest() -> None:
    def refusal(metric: Metric, retry_after: float | None) -> QuotaRefusal:
        return QuotaRefusal(Level.TENANT, "acme", "", metric, 10, 4, 5, 2, retry_after)

    soon, late = refusal(Metric.BURST, 1.0), refusal(Metric.TOKENS_PER_DAY, 3600.0)
    error = QuotaExceeded.of([soon, late])
    assert (error.retry_after, error.refusals) == (3600.0, (soon, late))
    assert error.message == (
        "tenant 'acme': tokens_per_day: limit 10, used 4, reserved 5, requested 2; retry after 3600.000 s"
    )
    assert QuotaExceeded.of([refusal(Metric.TOKENS_PER_MINUTE, None), late]).retry_after is None
