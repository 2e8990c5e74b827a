"""What a claim draws on, as the quota scripts take it: two strings, made once a window and not once a claim."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from json import dumps

from baton.core.types import Account, Limits, Metric
from baton.state.quota.buckets import Buckets, FlowBucket, WindowBucket, buckets_of
from baton.state.quota.windows import MICROSECONDS, Calendar, Window, WindowKind

KNOWN_DRAWINGS = 10_000  # of the latest tenants, keys and models


@dataclass(frozen=True, slots=True)
class Drawing:
    """``drawn`` names the fields of each scope, ``plan`` holds bounds and limits, as the scripts explain them."""

    account: Account
    buckets: Buckets
    windows: tuple[Window, ...]
    drawn: str
    plan: str

    def holds(self, moment: int) -> bool:
        for window in self.windows:  # noqa: SIM110 (asked for each claim)
            if not window.start <= moment < window.end:
                return False
        return True


class Drawings:
    """Makes drawings, and keeps the latest ones as long as neither a window ends nor an account changes."""

    def __init__(self) -> None:
        self._calendar = Calendar()
        self._known: OrderedDict[tuple[str, str, str, str], Drawing] = OrderedDict()

    def of(self, account: Account, model: str, moment: int) -> Drawing:
        """``moment`` in Unix microseconds."""
        who = (account.organisation.name, account.tenant.name, account.key.id, model)
        known = self._known.get(who)
        if known is None or not known.holds(moment) or not _same(known.account, account):
            known = self._draw(account, model, moment)
            self._known[who] = known
            if len(self._known) > KNOWN_DRAWINGS:
                self._known.popitem(last=False)
        return known

    def _draw(self, account: Account, model: str, moment: int) -> Drawing:
        buckets = buckets_of(account, model, lambda kind, zone: self._calendar.window(kind, zone, moment))
        windows = {(bucket.window.start, bucket.window.end): bucket.window for bucket in buckets.windows}
        drawn: list[list[str]] = []
        plan: list[int | str] = [len(windows)]
        for start, end in windows:
            plan += (start // MICROSECONDS, end // MICROSECONDS)
        for scope, parts in buckets.scopes:
            drawn.append([scope.name, *(bucket.field for bucket in parts)])
            ends = [bucket.window.end for bucket in parts if isinstance(bucket, WindowBucket)]
            plan.append(max(ends, default=0) // MICROSECONDS)
            for bucket in parts:
                plan += _window_limits(bucket) if isinstance(bucket, WindowBucket) else _flow_limits(bucket)
        return Drawing(account, buckets, tuple(windows.values()), dumps(drawn), dumps(plan))


def _same(known: Account, account: Account) -> bool:
    """Who keeps its accounts, as a gateway does, brings the same object again."""
    return known is account or known == account


def _window_limits(bucket: WindowBucket) -> tuple[int | str, ...]:
    limits = bucket.limits
    if bucket.window.kind is WindowKind.MINUTE:
        return (
            _enforced(limits, Metric.TOKENS_PER_MINUTE),
            _enforced(limits, Metric.REQUESTS_PER_MINUTE),
            _enforced(limits, Metric.INPUT_TOKENS_PER_MINUTE),
            _enforced(limits, Metric.OUTPUT_TOKENS_PER_MINUTE),
        )
    warned_of = bucket.alert_limit
    return _enforced(limits, bucket.metrics[0]), "-1" if warned_of is None else str(warned_of)


def _flow_limits(bucket: FlowBucket) -> tuple[int, ...]:
    """Concurrency, burst, and the burst's interval, which is kept up when the burst is only shadowed."""
    limits = bucket.limits
    interval = -1 if limits.burst is None else bucket.interval
    return _enforced(limits, Metric.CONCURRENCY), _enforced(limits, Metric.BURST), interval


def _enforced(limits: Limits, metric: Metric) -> int:
    """-1 for none: shadowed ones are not enforced."""
    limit = limits.of(metric)
    return -1 if limit is None or (limits.shadow and metric in limits.shadow) else limit
