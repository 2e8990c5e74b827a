"""What is left of a caller's quotas, as metadata: ``x-ratelimit-{limit,remaining,reset}-{requests,tokens,...}``.

Of several limits of one kind the one with the least left is told, which is the one that will refuse first. ``reset`` is
in seconds, and so is ``retry-after`` of a refusal; both are rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from baton.core.types import Metric, QuotaBalance, QuotaRefusal

Metadata = tuple[tuple[str, str], ...]
RETRY_AFTER: Final = "retry-after"
_KINDS: Final = {
    Metric.REQUESTS_PER_MINUTE: "requests",
    Metric.INPUT_TOKENS_PER_MINUTE: "input-tokens",
    Metric.OUTPUT_TOKENS_PER_MINUTE: "output-tokens",
    Metric.TOKENS_PER_MINUTE: "tokens",
}


def granted_metadata(balances: Iterable[QuotaBalance]) -> Metadata:
    """After an admission; empty without limits."""
    told = ((each.metric, each.limit, each.remaining, each.resets_after) for each in balances)
    return _metadata(
        [(m, limit, left, reset) for m, limit, left, reset in told if limit is not None and left is not None]
    )


def refused_metadata(refusals: Iterable[QuotaRefusal]) -> Metadata:
    """Of the limits that were in the way."""
    return _metadata(
        [
            (each.metric, each.limit, max(0, each.limit - each.used - each.reserved), each.retry_after)
            for each in refusals
        ]
    )


def retry_metadata(retry_after: float | None) -> Metadata:
    return () if retry_after is None else ((RETRY_AFTER, str(math.ceil(retry_after))),)


def _metadata(limits: list[tuple[Metric, int, int, float | None]]) -> Metadata:
    tightest: dict[Metric, tuple[int, int, float | None]] = {}
    for metric, limit, left, reset in limits:
        if metric in _KINDS and (metric not in tightest or left < tightest[metric][1]):
            tightest[metric] = limit, left, reset
    found: list[tuple[str, str]] = []
    for metric, kind in _KINDS.items():
        if metric in tightest:
            limit, left, reset = tightest[metric]
            found += [(f"x-ratelimit-limit-{kind}", str(limit)), (f"x-ratelimit-remaining-{kind}", str(left))]
            found += [(f"x-ratelimit-reset-{kind}", str(math.ceil(reset)))] if reset is not None else []
    return tuple(found)
