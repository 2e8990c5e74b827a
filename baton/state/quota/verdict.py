"""Whether a claim fits into its buckets, and what they stand at: pure arithmetic.

The Redis script compares the same sums; what it refuses is explained here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from baton.core.types import Metric, QuotaBalance, QuotaRefusal
from baton.state.quota.buckets import (
    FLOW,
    METRICS,
    WINDOW,
    Bucket,
    Cost,
    Counters,
    FlowCounters,
    WindowCounters,
    in_row,
)
from baton.state.quota.windows import MICROSECONDS, WindowKind, Windows

Buckets = tuple[Bucket, ...]
# ``tuple``'s own constructor takes half the time of ``QuotaBalance``'s, which counts the fields.
_tuple_new = cast("Callable[[type[QuotaBalance], Iterable[object]], QuotaBalance]", tuple.__new__)  # pyright: ignore

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
    return balances_in_row(buckets, windows, in_row(counters), now)


def balances_in_row(buckets: Buckets, windows: Windows, row: Sequence[float], now: int) -> tuple[QuotaBalance, ...]:
    """The same of counters in a row, as ``in_row`` and the scripts' answers have them.

    Done for each request, so nothing is made of counters but balances.
    """
    found: list[QuotaBalance] = []
    flows: list[QuotaBalance] = []
    waits = [(window.end - now) / MICROSECONDS for window in windows.each]
    at = 0
    for bucket in buckets:
        if bucket.has_flow:
            _flow_balances(flows, bucket, FlowCounters(int(row[at]), int(row[at + 1])), now)
        at += FLOW
        for kind in bucket.kinds:
            counted, wait = row[at + 1 : at + 7], waits[bucket.place(kind)]
            if kind is WindowKind.MINUTE:
                _minute_balances(found, bucket, counted, wait)
            else:
                _calendar_balance(found, bucket, kind, counted, wait)
            at += WINDOW
    return (*found, *flows)


def alert_percent(limit: int, used: int) -> int:
    """The highest of ``ALERT_PERCENTS`` that ``used`` reaches; 0 for none."""
    return max((percent for percent in ALERT_PERCENTS if used * 100 >= limit * percent), default=0)


def _calendar_balance(
    found: list[QuotaBalance], bucket: Bucket, kind: WindowKind, counted: Sequence[float], wait: float
) -> None:
    """Of a day or a month."""
    (level, subject, model), limits = bucket.scope, bucket.limits
    limit = limits.tokens_per_day if kind is WindowKind.DAY else limits.tokens_per_month
    used, reserved = int(counted[4] + counted[5]), int(counted[1] - counted[4] + counted[2] - counted[5])
    row = level, subject, model, METRICS[kind][0], limit, used, reserved, wait
    found.append(_tuple_new(QuotaBalance, row))


def _minute_balances(found: list[QuotaBalance], bucket: Bucket, counted: Sequence[float], wait: float) -> None:
    (level, subject, model), limits = bucket.scope, bucket.limits
    requests, prompts, answers, requests_used, prompts_used, answers_used = map(int, counted)
    if (limit := limits.requests_per_minute) is not None:
        row = level, subject, model, Metric.REQUESTS_PER_MINUTE, limit, requests_used, requests - requests_used, wait
        found.append(_tuple_new(QuotaBalance, row))
    if (limit := limits.input_tokens_per_minute) is not None:
        row = level, subject, model, Metric.INPUT_TOKENS_PER_MINUTE, limit, prompts_used, prompts - prompts_used, wait
        found.append(_tuple_new(QuotaBalance, row))
    if (limit := limits.output_tokens_per_minute) is not None:
        row = level, subject, model, Metric.OUTPUT_TOKENS_PER_MINUTE, limit, answers_used, answers - answers_used, wait
        found.append(_tuple_new(QuotaBalance, row))
    if (limit := limits.tokens_per_minute) is not None:
        used = prompts_used + answers_used
        row = level, subject, model, Metric.TOKENS_PER_MINUTE, limit, used, prompts + answers - used, wait
        found.append(_tuple_new(QuotaBalance, row))


def _flow_balances(found: list[QuotaBalance], bucket: Bucket, flow: FlowCounters, now: int) -> None:
    (level, subject, model), limits = bucket.scope, bucket.limits
    row = level, subject, model, Metric.CONCURRENCY, limits.concurrency, 0, flow.running, None
    found.append(_tuple_new(QuotaBalance, row))
    if limits.burst is not None:
        taken, whole_after = _burst_taken(bucket, flow, now), max(0, flow.arrival - now) / MICROSECONDS
        row = level, subject, model, Metric.BURST, limits.burst, taken, 0, whole_after
        found.append(_tuple_new(QuotaBalance, row))


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
