"""What a claim draws on, as the quota scripts take it: two strings, made once a window and not once a claim."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass

from baton.core.types import Account, Metric
from baton.state.quota.buckets import Buckets, FlowBucket, WindowBucket, buckets_of
from baton.state.quota.windows import Calendar, Window

KNOWN_DRAWINGS = 10_000  # of the latest tenants, keys and models


@dataclass(frozen=True, slots=True)
class Drawing:
    """``drawn`` names the fields of each scope, ``plan`` holds bounds and limits, as the scripts explain them.

    ``scopes``: for each entry, the scope's name and the buckets behind its fields; ``buckets``: the same ones, by kind.
    """

    account: Account
    buckets: Buckets
    scopes: tuple[tuple[str, tuple[WindowBucket | FlowBucket, ...]], ...]
    windows: tuple[Window, ...]
    drawn: str
    plan: str

    def holds(self, moment: int) -> bool:
        return all(window.holds(moment) for window in self.windows)


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
        found = buckets_of(account, model, lambda kind, zone: self._calendar.window(kind, zone, moment))
        by_scope: dict[str, list[WindowBucket | FlowBucket]] = {}
        for bucket in (*found.windows, *found.flows):
            by_scope.setdefault(bucket.scope.name, []).append(bucket)
        order = list(by_scope)
        buckets = Buckets(found.windows, tuple(sorted(found.flows, key=lambda flow: order.index(flow.scope.name))))
        windows = tuple(dict.fromkeys(bucket.window for bucket in buckets.windows))
        numbers = [len(windows), *(bound for window in windows for bound in (window.start, window.end))]
        for drawn in by_scope.values():
            for bucket in drawn:
                numbers += _window_numbers(bucket) if isinstance(bucket, WindowBucket) else _flow_numbers(bucket)
        return Drawing(
            account,
            buckets,
            tuple((name, tuple(drawn)) for name, drawn in by_scope.items()),
            windows,
            json.dumps([[name, [bucket.field for bucket in drawn]] for name, drawn in by_scope.items()]),
            json.dumps(numbers),
        )


def _same(known: Account, account: Account) -> bool:
    """Who keeps its accounts, as a gateway does, brings the same object again."""
    return known is account or known == account


def _window_numbers(bucket: WindowBucket) -> list[int]:
    """Its end, the limit of tokens and the one to warn of, then the minute's others. Shadowed ones are not enforced."""
    *others, tokens = [
        None if metric in bucket.limits.shadow else bucket.limits.of(metric) for metric in bucket.metrics
    ]
    return [bucket.window.end, *map(_number, (tokens, bucket.alert_limit, *others))]


def _flow_numbers(bucket: FlowBucket) -> list[int]:
    """Concurrency, burst, and the burst's interval, which is kept up when the burst is only shadowed."""
    limits = bucket.limits
    concurrency = None if Metric.CONCURRENCY in limits.shadow else limits.concurrency
    burst = None if Metric.BURST in limits.shadow else limits.burst
    return [_number(concurrency), _number(burst), -1 if limits.burst is None else bucket.interval]


def _number(limit: int | None) -> int:
    return -1 if limit is None else limit
