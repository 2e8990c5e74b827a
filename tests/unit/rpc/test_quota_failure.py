"""A refusal's figures, as any gRPC client may read them out of google.rpc.QuotaFailure."""

from __future__ import annotations

import pytest
from google.rpc.error_details_pb2 import QuotaFailure

from baton.core.errors import QuotaExceeded
from baton.core.types import Level, Metric, QuotaRefusal
from baton.rpc.errors import trailing_metadata
from baton.rpc.quota_failure import MAX_BYTES, quota_failure, refusals_of

SOON = QuotaRefusal(Level.TENANT, "acme", "m", Metric.REQUESTS_PER_MINUTE, 100, 60, 40, 1, 12.5)
LATER = QuotaRefusal(Level.KEY, "app", "", Metric.TOKENS_PER_DAY, 1000, 990, 5, 20, 3600.0)


def test_each_limit_in_the_way_is_a_violation_and_the_one_explained_comes_first() -> None:
    first, second = quota_failure(QuotaExceeded.of([SOON, LATER])).violations
    assert (first.subject, first.quota_metric, first.quota_value) == ("key:app", "tokens_per_day", 1000)
    assert first.description == str(LATER)
    assert dict(second.quota_dimensions) == {
        "model": "m",
        "used": "60",
        "reserved": "40",
        "requested": "1",
        "retry_after_seconds": "12.5",
    }


def test_what_is_told_stays_small_however_many_limits_refuse() -> None:
    """A request that meets all limits of all levels, with the longest names, is still told the one that matters."""
    everything = [
        QuotaRefusal(level, "t" * 63, "m" * 256, metric, 10**12, 10**12, 10**12, 10**12, float(number))
        for level in Level
        for number, metric in enumerate(Metric)
    ]
    error = QuotaExceeded.of(everything)
    failure = quota_failure(error)
    assert failure.violations[0].description == error.message
    assert 1 < len(failure.violations) < len(everything) and failure.ByteSize() <= MAX_BYTES
    ((_, raw),) = trailing_metadata(error)
    assert len(raw) < 4096


@pytest.mark.parametrize(
    "change",
    [
        {"subject": "planet:earth"},
        {"subject": "acme"},
        {"quota_metric": "smiles_per_hour"},
        {"quota_dimensions": {"used": "1", "reserved": "2"}},
        {"quota_dimensions": {"used": "1", "reserved": "2", "requested": "3", "retry_after_seconds": "nan"}},
        {"quota_dimensions": {"used": "1", "reserved": "2", "requested": "3", "retry_after_seconds": "-1"}},
    ],
)
def test_a_violation_that_is_not_ours_is_passed_over(change: dict[str, object]) -> None:
    failure = quota_failure(QuotaExceeded.of([SOON]))
    strange = failure.violations.add()
    strange.CopyFrom(failure.violations[0])
    fresh = QuotaFailure.Violation(**change)  # type: ignore[arg-type]
    for name in change:
        strange.ClearField(name)  # type: ignore[arg-type]
    strange.MergeFrom(fresh)
    assert refusals_of(failure) == (SOON,)
