"""What one gateway may admit by itself while the shared counters are away, so that all together admit no more than all.

It takes its part of what was left of a window when it last heard of it: a day that is nearly used up stays so, as far
as the gateways heard of it at about the same time; their parts of the limit bound what they admit in any case. Of a
window that it heard nothing of, as of each one that begins meanwhile, it takes its part of the limit. Concurrency and
bursts are parts of the limit, too: what is in progress ends, and a burst refills, without anybody's telling.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from baton.core.types import Limits, Metric
from baton.state.quota.buckets import METRICS, Bucket, Cost, Counters
from baton.state.quota.standing import Standing
from baton.state.quota.windows import WindowKind, Windows

KNOWN_SCOPES = 100_000


@dataclass(slots=True)
class _Heard:
    """Buckets as the shared counters last told them. ``counted_here``: what this gateway had counted by itself, in each
    kind of window of a bucket, when the first claim after that word came."""

    standing: Standing
    counted_here: dict[tuple[str, WindowKind], Cost] = field(default_factory=dict[tuple[str, WindowKind], Cost])


class LocalShare:
    """Of a gateway that is one of ``replicas``, as many as are known at the moment. Remembers the scopes that it heard
    of last."""

    def __init__(self, replicas: Callable[[], int]) -> None:
        self._replicas = replicas
        self._standings: OrderedDict[tuple[str, str], _Heard] = OrderedDict()

    def heard(self, standing: Standing) -> None:
        """What the shared counters stand at. Done for each request; it is looked into only while they are away."""
        standings, heard = self._standings, _Heard(standing)
        for scope in standing.drawing.scopes:
            standings[scope.name] = heard
            standings.move_to_end(scope.name)
        while len(standings) > KNOWN_SCOPES:
            standings.popitem(last=False)

    def of(
        self, organisation: str, buckets: tuple[Bucket, ...], windows: Windows, counted: Sequence[Counters]
    ) -> tuple[Bucket, ...]:
        """The buckets with this gateway's part of each limit. ``counted``: what is counted here."""
        replicas = max(1, self._replicas())
        return tuple(
            bucket._replace(limits=self._limits(organisation, bucket, windows, here, replicas))
            for bucket, here in zip(buckets, counted, strict=True)
        )

    def _limits(self, organisation: str, bucket: Bucket, windows: Windows, here: Counters, replicas: int) -> Limits:
        name = (organisation, bucket.scope.name)
        part, heard = _part_of(bucket.limits, replicas), self._standings.get(name)
        if heard is None:
            return part
        narrowed: dict[str, int | None] = {}
        standing = heard.standing
        position = [scope.name for scope in standing.drawing.scopes].index(name)
        there = standing.drawing.buckets[position]
        told = dict(zip(there.kinds, standing.counters[position].windows, strict=True))
        for kind, counters in zip(bucket.kinds, here.windows, strict=True):
            place = bucket.place(kind)
            if kind not in told or standing.windows.each[place] != windows.each[place]:
                continue
            before = heard.counted_here.setdefault((bucket.scope.name, kind), counters.total)
            for metric in METRICS[kind]:
                limit, most = there.limits.of(metric), part.of(metric)
                if limit is not None and most is not None:
                    left = max(0, limit - told[kind].total.of(metric))
                    narrowed[metric.value] = min(most, before.of(metric) + left // replicas)
        return replace(part, **narrowed)


def _part_of(limits: Limits, replicas: int) -> Limits:
    """Rounded down, so together never more than all. A burst stays at least 1; the minute's limit bounds it."""
    values = {metric.value: limits.of(metric) for metric in Metric}
    parts = {name: None if value is None else value // replicas for name, value in values.items()}
    if parts["burst"] is not None:
        parts["burst"] = max(1, parts["burst"]) if parts["requests_per_minute"] else None
    return Limits(**parts, shadow=limits.shadow)
