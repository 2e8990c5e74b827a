"""Whether a claim fits into its buckets, and what they stand at: pure arithmetic.

The Redis script compares the same sums; what it refuses is explained here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.core.types import Limits, Metric, QuotaBalance, QuotaRefusal
from baton.state.quota.buckets import METRICS, Bucket, Cost, Counters, FlowCounters, Scope, WindowCounters
from baton.state.quota.windows import MICROSECONDS, WindowKind, Windows

Buckets = tuple[Bucket, ...]

CONCURRENCY_RETRY_SECONDS = 1.0  # nobody knows when a running request ends
ALERT_PERCENTS = (50, 80, 100)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``refused`` empty: the claim fits. ``shadowed``: limits it breaks that are not enforced."""

    refused: tuple[QuotaRefusal, ...]
    shadowed: tuple[QuotaRefusal, ...]


def judge(buckets: Buckets, windows: Windows, counters: Sequence[Counters], cost: Cost, now: int) -> Verdict:
    """Whether ``cost``, and one request more in progress, fits into every bucket. ``now`` in Unix microseconds."""
    refused: list[QuotaRefusal] = []
    shadowed: list[QuotaRefusal] = []
    for bucket, refusal in _refusals(buckets, windows, counters, cost, now):
        (shadowed if refusal.metric in bucket.limits.shadow else refused).append(refusal)
    return Verdict(tuple(refused), tuple(shadowed))


def debited(bucket: Bucket, flow: FlowCounters, requests: int, now: int) -> FlowCounters:
    """One request more in progress, and ``requests`` (0 for one that was charged before) out of the burst."""
    has_burst = bucket.limits.burst is not None
    arrival = max(now, flow.arrival) + requests * bucket.interval if has_burst else flow.arrival
    return FlowCounters(flow.running + 1, arrival)


def undebited(bucket: Bucket, flow: FlowCounters, requests: int) -> FlowCounters:
    """What ``debited`` began with, as far as a verdict of the same claim can tell."""
    has_burst = bucket.limits.burst is not None
    arrival = flow.arrival - requests * bucket.interval if has_burst else flow.arrival
    return FlowCounters(flow.running - 1, arrival)


def balances(buckets: Buckets, windows: Windows, counters: Sequence[Counters], now: int) -> tuple[QuotaBalance, ...]:
    """What every limit, and every counter without one, stands at."""
    found: list[QuotaBalance] = []
    waits = [(window.end - now) / MICROSECONDS for window in windows.each]
    for bucket, held in zip(buckets, counters, strict=True):
        who, limits = bucket.scope, bucket.limits
        for kind, (used, reserved) in zip(bucket.kinds, held.windows, strict=True):
            wait = waits[bucket.place(kind)]
            if kind is WindowKind.MINUTE:
                _minute_balances(found, who, limits, used, reserved, wait)
            else:
                limit = limits.tokens_per_day if kind is WindowKind.DAY else limits.tokens_per_month
                tokens = used[1] + used[2], reserved[1] + reserved[2]
                found.append(QuotaBalance(*who, METRICS[kind][0], limit, *tokens, wait))
    for bucket, held in zip(buckets, counters, strict=True):
        if bucket.has_flow:
            _flow_balances(found, bucket, held.flow, now)
    return tuple(found)


def alert_percent(limit: int, used: int) -> int:
    """The highest of ``ALERT_PERCENTS`` that ``used`` reaches; 0 for none."""
    return max((percent for percent in ALERT_PERCENTS if used * 100 >= limit * percent), default=0)


def _minute_balances(
    found: list[QuotaBalance], who: Scope, limits: Limits, used: Cost, reserved: Cost, wait: float
) -> None:
    """Written out, since it is done for each request."""
    if (limit := limits.requests_per_minute) is not None:
        found.append(QuotaBalance(*who, Metric.REQUESTS_PER_MINUTE, limit, used[0], reserved[0], wait))
    if (limit := limits.input_tokens_per_minute) is not None:
        found.append(QuotaBalance(*who, Metric.INPUT_TOKENS_PER_MINUTE, limit, used[1], reserved[1], wait))
    if (limit := limits.output_tokens_per_minute) is not None:
        found.append(QuotaBalance(*who, Metric.OUTPUT_TOKENS_PER_MINUTE, limit, used[2], reserved[2], wait))
    if (limit := limits.tokens_per_minute) is not None:
        tokens = used[1] + used[2], reserved[1] + reserved[2]
        found.append(QuotaBalance(*who, Metric.TOKENS_PER_MINUTE, limit, *tokens, wait))


def _flow_balances(found: list[QuotaBalance], bucket: Bucket, flow: FlowCounters, now: int) -> None:
    who, limits = bucket.scope, bucket.limits
    found.append(QuotaBalance(*who, Metric.CONCURRENCY, limits.concurrency, 0, flow.running, None))
    if limits.burst is not None:
        taken, whole_after = _burst_taken(bucket, flow, now), max(0, flow.arrival - now) / MICROSECONDS
        found.append(QuotaBalance(*who, Metric.BURST, limits.burst, taken, 0, whole_after))


def _refusals(
    buckets: Buckets, windows: Windows, counters: Sequence[Counters], cost: Cost, now: int
) -> Iterator[tuple[Bucket, QuotaRefusal]]:
    for bucket, held in zip(buckets, counters, strict=True):
        for kind, counted in zip(bucket.kinds, held.windows, strict=True):
            wait = (windows.each[bucket.place(kind)].end - now) / MICROSECONDS
            for refusal in _window_refusals(bucket, kind, counted, cost, wait):
                yield bucket, refusal
    for bucket, held in zip(buckets, counters, strict=True):
        for refusal in _flow_refusals(bucket, held.flow, cost, now):
            yield bucket, refusal


def _window_refusals(
    bucket: Bucket, kind: WindowKind, held: WindowCounters, cost: Cost, wait: float
) -> Iterator[QuotaRefusal]:
    """``wait``: seconds until the window ends."""
    for metric in METRICS[kind]:
        limit, asked = bucket.limits.of(metric), cost.of(metric)
        used, reserved = held.used.of(metric), held.reserved.of(metric)
        if limit is not None and asked > 0 and used + reserved + asked > limit:
            retry_after = wait if asked <= limit else None
            yield QuotaRefusal(*bucket.scope, metric, limit, used, reserved, asked, retry_after)


def _flow_refusals(bucket: Bucket, flow: FlowCounters, cost: Cost, now: int) -> Iterator[QuotaRefusal]:
    scope, limit, burst = bucket.scope, bucket.limits.concurrency, bucket.limits.burst
    if limit is not None and flow.running + 1 > limit:
        wait = CONCURRENCY_RETRY_SECONDS if limit else None
        yield QuotaRefusal(*scope, Metric.CONCURRENCY, limit, 0, flow.running, 1, wait)
    if burst is not None and cost.requests > 0:
        late = max(now, flow.arrival) + cost.requests * bucket.interval - now - burst * bucket.interval
        if late > 0:
            taken, wait = _burst_taken(bucket, flow, now), late / MICROSECONDS
            yield QuotaRefusal(*scope, Metric.BURST, burst, taken, 0, cost.requests, wait)


def _burst_taken(bucket: Bucket, flow: FlowCounters, now: int) -> int:
    return -(-max(0, flow.arrival - now) // bucket.interval)
