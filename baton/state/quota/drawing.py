"""What a claim draws on, as the quota scripts take it: made once for an account and model, whatever the time.

Most of it is the same for all that have the same limits, however many tenants and keys they are. So a claim that is the
first of its key costs little more than any other.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.types import Account, Level, Limits, Metric
from baton.state.quota.buckets import METRICS, Bucket, Scope, buckets_of
from baton.state.quota.claims import check_payer
from baton.state.quota.keys import organisation_prefix
from baton.state.quota.windows import MICROSECONDS, WindowKind, Windows

# Of keys and models, the latest used. With all limits on three levels one takes 1.1 kB, and 1.5 where each key has
# limits of its own, so all of them 75 MB at most.
KNOWN_DRAWINGS = 50_000
KNOWN_SCOPES = 20_000  # of organisations and tenants, with their models: several keys draw on them
KNOWN_PLANS = 10_000  # of limits; one takes less than 1 kB
NO_LIMIT = 2**53  # no total reaches it, and a double holds it
WINDOW_KEPT = 120_000  # milliseconds that counters live after a window's end: refunds and readers come late
FLOW_KEPT = 86_400_000  # the same after a claim, as the scripts have it: longer than any request is in progress
_Zones = tuple[str, str]  # of organisation and tenant
_Alike = tuple[_Zones, Limits, tuple[WindowKind, ...], bool, bool]  # what scopes with one plan have in common


class PackedPlan(NamedTuple):
    """In doubles, as the scripts explain them. ``drawn``: the windows that a reservation draws on, as it keeps them."""

    plan: bytes
    drawn: bytes


class ScopePlan:
    """What a script is told of a scope with certain limits, whosever they are. Packed once for the same windows."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket  # any one of those it is for
        self._windows: Windows | None = None
        self._packed = PackedPlan(b"", b"")

    def packed(self, windows: Windows) -> PackedPlan:
        """The scope's part of both."""
        if self._windows is not windows:
            self._packed, self._windows = self._pack(windows), windows
        return self._packed

    def _pack(self, windows: Windows) -> PackedPlan:
        bucket = self._bucket
        kinds, has_flow = bucket.kinds, int(bucket.has_flow)
        ids = [windows.ids[bucket.place(kind)] for kind in kinds]
        live_until, minute = _live_until(bucket, windows), _minute_limits(bucket.limits)
        numbers = [len(kinds), has_flow, *_flow_limits(bucket), live_until, *minute]
        for kind, window_id in zip(kinds, ids, strict=True):
            metric = METRICS[kind][-1]
            limit = bucket.limits.of(metric)
            numbers += (window_id, _enforced(bucket.limits, metric, limit), bucket.alert_limit(kind) or 0)
        return PackedPlan(_doubles(*numbers), _doubles(has_flow, len(ids), *ids))


@dataclass(frozen=True, slots=True)
class DrawnScope:
    """``key``: where its counters are; ``name`` (organisation and scope) tells it from all others."""

    bucket: Bucket
    key: str
    name: tuple[str, str]
    plan: ScopePlan


@dataclass(frozen=True, slots=True)
class Drawing:
    """``prefix`` of the organisation's keys. ``about``: tenant, key and model, a line each."""

    account: Account
    scopes: tuple[DrawnScope, ...]
    has_shadow: bool
    prefix: str
    about: str

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple([scope.bucket for scope in self.scopes])

    def packed(self, windows: Windows) -> PackedPlan:
        """Of all its scopes."""
        parts = [scope.plan.packed(windows) for scope in self.scopes]
        return PackedPlan(b"".join([plan for plan, _ in parts]), b"".join([drawn for _, drawn in parts]))


class Drawings:
    """Makes drawings, and keeps the latest ones as long as an account does not change. Keys are in ``namespace``."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._known: OrderedDict[tuple[str, str], Drawing] = OrderedDict()
        self._scopes: dict[tuple[str, _Zones, Scope], DrawnScope] = {}
        self._plans: dict[_Alike, ScopePlan] = {}

    def of(self, account: Account, model: str) -> Drawing:
        """InvalidRequest for names that no key may have."""
        who = (account.key.id, model)
        known = self._known.get(who)
        if known is not None and _same(known.account, account):
            self._known.move_to_end(who)
            return known
        made = self._known[who] = self._draw(account, model)
        self._known.move_to_end(who)
        if len(self._known) > KNOWN_DRAWINGS:
            self._known.popitem(last=False)
        return made

    def _draw(self, account: Account, model: str) -> Drawing:
        check_payer(account, model)
        buckets, organisation = buckets_of(account, model), account.organisation.name
        zones = account.organisation.time_zone, account.tenant.time_zone
        return Drawing(
            account,
            tuple([self._scope(organisation, zones, bucket) for bucket in buckets]),
            has_shadow=any(bucket.limits.shadow for bucket in buckets),
            prefix=organisation_prefix(self._namespace, organisation),
            about=f"{account.tenant.name}\n{account.key.id}\n{model}",
        )

    def _scope(self, organisation: str, zones: _Zones, bucket: Bucket) -> DrawnScope:
        where = (organisation, zones, bucket.scope)
        known = self._scopes.get(where)
        if known is not None and known.bucket == bucket:
            return known
        name = bucket.scope.name
        key = organisation_prefix(self._namespace, organisation) + name
        made = DrawnScope(bucket, key, (organisation, name), self._plan(zones, bucket))
        if bucket.scope.level is not Level.KEY:
            if len(self._scopes) >= KNOWN_SCOPES:
                self._scopes.clear()
            self._scopes[where] = made
        return made

    def _plan(self, zones: _Zones, bucket: Bucket) -> ScopePlan:
        """Each pair of time zones has its own, since it keeps what it packed last."""
        alike = (zones, bucket.limits, bucket.kinds, bucket.has_flow, bucket.scope.level is Level.ORGANISATION)
        known = self._plans.get(alike)
        if known is None:
            if len(self._plans) >= KNOWN_PLANS:
                self._plans.clear()
            known = self._plans[alike] = ScopePlan(bucket)
        return known


def _same(known: Account, account: Account) -> bool:
    """Who keeps its accounts, as a gateway does, brings the same object again."""
    return known is account or known == account


def _doubles(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}d", *numbers)


def _live_until(bucket: Bucket, windows: Windows) -> int:
    """Until when counters live at least that are written in these windows, Unix milliseconds; 0 where there is none.

    A scope that counts the minute is written anew in each; as long as it lasts, nobody need prolong the scope's life.
    """
    ends = {kind: windows.each[bucket.place(kind)].end * 1000 // MICROSECONDS for kind in bucket.kinds}
    minute = ends[WindowKind.MINUTE] + FLOW_KEPT if WindowKind.MINUTE in ends else 0
    return max([minute, *(end + WINDOW_KEPT for end in ends.values())])


def _flow_limits(bucket: Bucket) -> tuple[int, int, int]:
    """Concurrency, the burst's time, and its interval, which is kept up when the burst is only shadowed."""
    limits = bucket.limits
    concurrency = _enforced(limits, Metric.CONCURRENCY, limits.concurrency)
    if limits.burst is None:
        return concurrency, NO_LIMIT, 0
    burst = _enforced(limits, Metric.BURST, limits.burst * bucket.interval)
    return concurrency, burst, bucket.interval


def _minute_limits(limits: Limits) -> list[int]:
    """Of requests, input and output."""
    return [_enforced(limits, metric, limits.of(metric)) for metric in METRICS[WindowKind.MINUTE][:-1]]


def _enforced(limits: Limits, metric: Metric, limit: int | None) -> int:
    """Shadowed ones are not."""
    return NO_LIMIT if limit is None or (limits.shadow and metric in limits.shadow) else limit
