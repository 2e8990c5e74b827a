"""Whether a claim fits into its buckets, and what they stand at: pure arithmetic.

The Redis script compares the same sums; what it refuses is explained here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.core.types import Metric, QuotaBalance, QuotaRefusal
from baton.state.quota.buckets import Buckets, Cost, Counters, FlowBucket, FlowCounters, WindowBucket, WindowCounters
from baton.state.quota.windows import MICROSECONDS, WindowKind

CONCURRENCY_RETRY_SECONDS = 1.0  # nobody knows when a running request ends
ALERT_PERCENTS = (50, 80, 100)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``refused`` empty: the claim fits. ``shadowed``: limits it breaks that are not enforced."""

    refused: tuple[QuotaRefusal, ...]
    shadowed: tuple[QuotaRefusal, ...]


def judge(buckets: Buckets, counters: Counters, cost: Cost, now: int) -> Verdict:
    """Whether ``cost``, and one request more in progress, fits into every bucket. ``now`` in Unix microseconds."""
    refused: list[QuotaRefusal] = []
    shadowed: list[QuotaRefusal] = []
    for bucket, refusal in _refusals(buckets, counters, cost, now):
        (shadowed if refusal.metric in bucket.limits.shadow else refused).append(refusal)
    return Verdict(tuple(refused), tuple(shadowed))


def debited(bucket: FlowBucket, counters: FlowCounters, requests: int, now: int) -> FlowCounters:
    """One request more in progress, and ``requests`` (0 for one that was charged before) out of the burst."""
    arrival = max(now, counters.arrival) + requests * bucket.interval if bucket.burst is not None else counters.arrival
    return FlowCounters(counters.running + 1, arrival)


def undebited(bucket: FlowBucket, counters: FlowCounters, requests: int) -> FlowCounters:
    """What ``debited`` began with, as far as a verdict of the same claim can tell."""
    arrival = counters.arrival - requests * bucket.interval if bucket.burst is not None else counters.arrival
    return FlowCounters(counters.running - 1, arrival)


def balances(buckets: Buckets, counters: Counters, now: int) -> tuple[QuotaBalance, ...]:
    """What every limit, and every counter without one, stands at."""
    found: list[QuotaBalance] = []
    for bucket, held in zip(buckets.windows, counters.windows, strict=True):
        (level, subject, model), limits, window = bucket
        used, reserved = held
        resets_after = (window.end - now) / MICROSECONDS
        for metric in bucket.metrics:
            limit = limits.of(metric)
            if limit is not None or window.kind is not WindowKind.MINUTE:
                standing = used.of(metric), reserved.of(metric)
                found.append(QuotaBalance(level, subject, model, metric, limit, *standing, resets_after))
    for bucket, flow in zip(buckets.flows, counters.flows, strict=True):
        (level, subject, model), limits = bucket
        running, most, burst = flow.running, limits.concurrency, limits.burst
        found.append(QuotaBalance(level, subject, model, Metric.CONCURRENCY, most, 0, running, None))
        if burst is not None:
            taken, whole_after = _burst_taken(bucket, flow, now), max(0, flow.arrival - now) / MICROSECONDS
            found.append(QuotaBalance(level, subject, model, Metric.BURST, burst, taken, 0, whole_after))
    return tuple(found)


def alert_percent(limit: int, used: int) -> int:
    """The highest of ``ALERT_PERCENTS`` that ``used`` reaches; 0 for none."""
    return max((percent for percent in ALERT_PERCENTS if used * 100 >= limit * percent), default=0)


def _refusals(
    buckets: Buckets, counters: Counters, cost: Cost, now: int
) -> Iterator[tuple[WindowBucket | FlowBucket, QuotaRefusal]]:
    for bucket, held in zip(buckets.windows, counters.windows, strict=True):
        for refusal in _window_refusals(bucket, held, cost, now):
            yield bucket, refusal
    for bucket, flow in zip(buckets.flows, counters.flows, strict=True):
        for refusal in _flow_refusals(bucket, flow, cost, now):
            yield bucket, refusal


def _window_refusals(bucket: WindowBucket, held: WindowCounters, cost: Cost, now: int) -> Iterator[QuotaRefusal]:
    scope, wait = bucket.scope, (bucket.window.end - now) / MICROSECONDS
    for metric in bucket.metrics:
        limit, asked = bucket.limits.of(metric), cost.of(metric)
        used, reserved = held.used.of(metric), held.reserved.of(metric)
        if limit is not None and asked > 0 and used + reserved + asked > limit:
            retry_after = wait if asked <= limit else None
            yield QuotaRefusal(
                scope.level, scope.subject, scope.model, metric, limit, used, reserved, asked, retry_after
            )


def _flow_refusals(bucket: FlowBucket, flow: FlowCounters, cost: Cost, now: int) -> Iterator[QuotaRefusal]:
    scope, limit = bucket.scope, bucket.limits.concurrency
    if limit is not None and flow.running + 1 > limit:
        wait = CONCURRENCY_RETRY_SECONDS if limit else None
        yield QuotaRefusal(scope.level, scope.subject, scope.model, Metric.CONCURRENCY, limit, 0, flow.running, 1, wait)
    if bucket.burst is not None and cost.requests > 0:
        late = max(now, flow.arrival) + cost.requests * bucket.interval - now - bucket.burst * bucket.interval
        if late > 0:
            taken, wait = _burst_taken(bucket, flow, now), late / MICROSECONDS
            yield QuotaRefusal(
                scope.level, scope.subject, scope.model, Metric.BURST, bucket.burst, taken, 0, cost.requests, wait
            )


def _burst_taken(bucket: FlowBucket, flow: FlowCounters, now: int) -> int:
    return -(-max(0, flow.arrival - now) // bucket.interval)
