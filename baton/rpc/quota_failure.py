"""Which limits a request would have broken, as google.rpc.QuotaFailure: a violation each, readable by any client.

``subject`` is the level and who is meant, ``tenant:acme``; ``quota_metric`` and ``quota_value`` the limit; the other
figures are in ``quota_dimensions``. Trailing metadata has to stay small, so the violations told are those that fit; the
one that the error's message explains comes first. ``ExplainRefusal`` of the admin API tells all.
"""

from __future__ import annotations

import math
from typing import Final

from google.rpc.error_details_pb2 import QuotaFailure

from baton.core.errors import QuotaExceeded
from baton.core.types import Level, Metric, QuotaRefusal

MAX_BYTES: Final = 2048  # servers and proxies accept 8 KiB of metadata in all
_FIGURES: Final = ("used", "reserved", "requested")


def quota_failure(error: QuotaExceeded) -> QuotaFailure:
    """An error without refusals has one violation, of nobody in particular."""
    failure = QuotaFailure()
    for refusal in sorted(error.refusals, key=lambda refusal: str(refusal) != error.message):
        violation = _violation(refusal)
        if failure.violations and failure.ByteSize() + violation.ByteSize() > MAX_BYTES:
            break
        failure.violations.append(violation)
    if not failure.violations:
        failure.violations.add(subject=Level.TENANT, description=error.message[:MAX_BYTES])
    return failure


def refusals_of(failure: QuotaFailure) -> tuple[QuotaRefusal, ...]:
    """Those that this version understands."""
    found: list[QuotaRefusal] = []
    for violation in failure.violations:
        try:
            found.append(_refusal(violation))
        except ValueError:
            continue
    return tuple(found)


def _violation(refusal: QuotaRefusal) -> QuotaFailure.Violation:
    dimensions = {name: str(getattr(refusal, name)) for name in _FIGURES}
    if refusal.model:
        dimensions["model"] = refusal.model
    if refusal.retry_after is not None:
        dimensions["retry_after_seconds"] = repr(refusal.retry_after)
    return QuotaFailure.Violation(
        subject=f"{refusal.level}:{refusal.subject}",
        description=str(refusal),
        quota_metric=refusal.metric,
        quota_value=refusal.limit,
        quota_dimensions=dimensions,
    )


def _refusal(violation: QuotaFailure.Violation) -> QuotaRefusal:
    level, _, subject = violation.subject.partition(":")
    dimensions = violation.quota_dimensions
    used, reserved, requested = (int(dimensions.get(name, "")) for name in _FIGURES)
    wait = float(dimensions["retry_after_seconds"]) if "retry_after_seconds" in dimensions else None
    if wait is not None and not 0 <= wait < math.inf:
        raise ValueError(wait)
    return QuotaRefusal(
        level=Level(level),
        subject=subject,
        model=dimensions.get("model", ""),
        metric=Metric(violation.quota_metric),
        limit=violation.quota_value,
        used=used,
        reserved=reserved,
        requested=requested,
        retry_after=wait,
    )
