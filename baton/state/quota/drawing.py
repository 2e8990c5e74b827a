"""What a claim draws on, as the quota scripts take it: made once for an account and model, whatever the time.

What changes by the minute, the windows' ids and ends, is the same for all accounts of a time zone and told beside it.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass

from baton.core.types import Account, Limits, Metric
from baton.state.quota.buckets import METRICS, Bucket, buckets_of
from baton.state.quota.windows import WindowKind

# Of keys and models, the latest used. With all limits on three levels one takes 1.4 kB, so all of them 70 MB.
KNOWN_DRAWINGS = 50_000
NO_LIMIT = 2**53  # no total reaches it, and a double holds it


@dataclass(frozen=True, slots=True)
class Drawing:
    """``plan``: the limits of each bucket, in doubles as the scripts explain them."""

    account: Account
    buckets: tuple[Bucket, ...]
    has_shadow: bool
    plan: bytes


class Drawings:
    """Makes drawings, and keeps the latest ones as long as an account does not change."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], Drawing] = OrderedDict()

    def of(self, account: Account, model: str) -> Drawing:
        who = (account.key.id, model)
        known = self._known.get(who)
        if known is not None and _same(known.account, account):
            self._known.move_to_end(who)
            return known
        made = self._known[who] = _draw(account, model)
        self._known.move_to_end(who)
        if len(self._known) > KNOWN_DRAWINGS:
            self._known.popitem(last=False)
        return made


def _same(known: Account, account: Account) -> bool:
    """Who keeps its accounts, as a gateway does, brings the same object again."""
    return known is account or known == account


def _draw(account: Account, model: str) -> Drawing:
    buckets = buckets_of(account, model)
    numbers: list[int] = []
    for bucket in buckets:
        places = [bucket.place(kind) + 1 for kind in bucket.kinds]
        numbers += (len(places), bucket.has_flow, *_flow_limits(bucket), places[-1] if places else 0)
        for place, kind in zip(places, bucket.kinds, strict=True):
            numbers += (place, *_window_limits(bucket, kind))
    has_shadow = any(bucket.limits.shadow for bucket in buckets)
    return Drawing(account, buckets, has_shadow, struct.pack(f"<{len(numbers)}d", *numbers))


def _flow_limits(bucket: Bucket) -> tuple[int, int, int]:
    """Concurrency, the burst's time, and its interval, which is kept up when the burst is only shadowed."""
    limits = bucket.limits
    concurrency = _enforced(limits, Metric.CONCURRENCY, limits.concurrency)
    if limits.burst is None:
        return concurrency, NO_LIMIT, 0
    burst = _enforced(limits, Metric.BURST, limits.burst * bucket.interval)
    return concurrency, burst, bucket.interval


def _window_limits(bucket: Bucket, kind: WindowKind) -> tuple[int, int, int, int, int]:
    limits = bucket.limits
    if kind is not WindowKind.MINUTE:
        limit = limits.tokens_per_day if kind is WindowKind.DAY else limits.tokens_per_month
        return _enforced(limits, METRICS[kind][0], limit), NO_LIMIT, NO_LIMIT, NO_LIMIT, limit or 0
    return (
        _enforced(limits, Metric.TOKENS_PER_MINUTE, limits.tokens_per_minute),
        _enforced(limits, Metric.REQUESTS_PER_MINUTE, limits.requests_per_minute),
        _enforced(limits, Metric.INPUT_TOKENS_PER_MINUTE, limits.input_tokens_per_minute),
        _enforced(limits, Metric.OUTPUT_TOKENS_PER_MINUTE, limits.output_tokens_per_minute),
        0,
    )


def _enforced(limits: Limits, metric: Metric, limit: int | None) -> int:
    """Shadowed ones are not."""
    return NO_LIMIT if limit is None or (limits.shadow and metric in limits.shadow) else limit
