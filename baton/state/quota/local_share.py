"""What one gateway may admit by itself while the shared counters are away, so that all together admit no more than all.

It takes its part of what was left of a window when it last heard of it: a day that is nearly used up stays so. Of a
window that it heard nothing of, as of each one that begins meanwhile, it takes its part of the limit. Concurrency and
bursts are parts of the limit, too: what is in progress ends, and a burst refills, without anybody's telling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.core.types import Limits, Metric
from baton.state.quota.buckets import Buckets, Cost, Counters, WindowBucket, WindowCounters
from baton.state.quota.windows import MINUTE

KNOWN_WINDOWS = 100_000


@dataclass(slots=True)
class _Standing:
    """A window as the shared counters last told it. ``counted_here``: what this gateway had counted by itself when the
    first claim after that word came; None: no claim came."""

    limits: Limits
    counters: WindowCounters
    end: int
    counted_here: Cost | None = None


class LocalShare:
    """Of a gateway that is one of ``replicas``, as many as are known at the moment."""

    def __init__(self, replicas: Callable[[], int]) -> None:
        self._replicas = replicas
        self._standings: dict[tuple[str, str], _Standing] = {}
        self._tidied = 0

    def heard(self, organisation: str, buckets: Buckets, counters: Counters, now: int) -> None:
        """What the shared counters stand at, ``now`` in Unix microseconds."""
        standings = self._standings
        for bucket, held in zip(buckets.windows, counters.windows, strict=True):
            standings[organisation, bucket.name] = _Standing(bucket.limits, held, bucket.window.end)
        if now - self._tidied >= MINUTE:
            self._tidied = now
            self._standings = {key: standing for key, standing in standings.items() if standing.end > now}
        while len(self._standings) > KNOWN_WINDOWS:
            del self._standings[next(iter(self._standings))]

    def of(self, organisation: str, buckets: Buckets, counted: Sequence[Cost]) -> Buckets:
        """The buckets with this gateway's part of each limit. ``counted``: what is counted here, by window."""
        pairs = zip(buckets.windows, counted, strict=True)
        windows = tuple(self._window(organisation, bucket, cost) for bucket, cost in pairs)
        flows = tuple(bucket._replace(limits=self._part_of(bucket.limits)) for bucket in buckets.flows)
        return buckets.replaced(windows, flows)

    def _window(self, organisation: str, bucket: WindowBucket, counted: Cost) -> WindowBucket:
        part, standing = self._part_of(bucket.limits), self._standings.get((organisation, bucket.name))
        if standing is not None:
            if standing.counted_here is None:
                standing.counted_here = counted
            narrowed = {metric.value: self._narrow(metric, part, standing) for metric in bucket.metrics}
            part = replace(part, **narrowed)
        return bucket._replace(limits=part)

    def _narrow(self, metric: Metric, part: Limits, standing: _Standing) -> int | None:
        """A part of what was left, beyond what had been counted here before."""
        limit, most, before = standing.limits.of(metric), part.of(metric), standing.counted_here
        if limit is None or most is None or before is None:
            return most
        left = max(0, limit - standing.counters.used.of(metric) - standing.counters.reserved.of(metric))
        return min(most, before.of(metric) + left // self._replicas())

    def _part_of(self, limits: Limits) -> Limits:
        """Rounded down, so together never more than all. A burst stays at least 1; the minute's limit bounds it."""
        values, replicas = {metric.value: limits.of(metric) for metric in Metric}, self._replicas()
        parts = {name: None if value is None else value // replicas for name, value in values.items()}
        if parts["burst"] is not None:
            parts["burst"] = max(1, parts["burst"]) if parts["requests_per_minute"] else None
        return Limits(**parts, shadow=limits.shadow)
