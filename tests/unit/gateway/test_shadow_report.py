"""What a limit in shadow would have refused can be told apart by tenant, and costs a bounded number of series."""

from __future__ import annotations

import asyncio
import logging

import pytest

from baton.core.types import Delivered, Level, Limits, Metric, QuotaRefusal
from baton.telemetry.metrics import PrometheusMeter
from gateway.admission import AdmissionPolicy
from gateway.shadow import SUBJECTS, ShadowReport
from tests.unit.gateway.quota_doubles import claim, gate

SHADOWED = Limits(requests_per_minute=1, shadow=frozenset({Metric.REQUESTS_PER_MINUTE}))


def counted(meter: PrometheusMeter) -> dict[str, float]:
    """By subject."""
    found: dict[str, float] = {}
    for line in meter.exposition().decode().splitlines():
        if line.startswith("baton_quota_shadow_refusals_total{"):
            subject = line.partition('subject="')[2].partition('"')[0]
            found[subject] = float(line.rpartition(" ")[2])
    return found


def test_requests_that_a_limit_in_shadow_would_refuse_are_counted_for_its_tenant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        meter = PrometheusMeter()
        async with gate(AdmissionPolicy(), meter) as gateway:
            for number in range(3):
                async with gateway.admitted(claim(f"a-{number}", SHADOWED)) as grant:
                    grant.note(Delivered(10, 0, 5))
            async with gateway.admitted(claim("z-0", SHADOWED, tenant="zeta")):
                pass
        assert counted(meter) == {"acme": 2.0}, "the first one of each tenant fits"

    with caplog.at_level(logging.INFO, logger="gateway.shadow"):
        asyncio.run(body())
    quotas = [getattr(record, "quota", "") for record in caplog.records if record.name == "gateway.shadow"]
    assert len(quotas) == 2 and "tenant 'acme': requests_per_minute: limit 1, used 1" in quotas[0]


def test_subjects_beyond_the_first_hundred_share_one_series() -> None:
    meter = PrometheusMeter()
    report = ShadowReport(meter)
    for number in range(SUBJECTS + 7):
        name = f"t{number}"
        report.note([QuotaRefusal(Level.TENANT, name, "", Metric.BURST, 1, 1, 0, 1, 1.0)] * 2)
    found = counted(meter)
    assert len(found) == SUBJECTS + 1 and found["t0"] == 2.0 and found["other"] == 14.0
