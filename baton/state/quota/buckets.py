"""From a claim to the buckets that it draws on, and what they count.

A bucket is one level's counters, for one model or all: in windows, and of requests in progress and the burst without
one. Counters exist for every limit, and for a tenant's days, months and requests in progress without one, so that a
limit set later finds what was used before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from baton.core.types import (
    Account,
    Delivered,
    Level,
    Limits,
    Metric,
    Prices,
)
from baton.state.quota.windows import KINDS, MINUTE, WindowKind

METRICS = {
    WindowKind.MINUTE: (
        Metric.REQUESTS_PER_MINUTE,
        Metric.INPUT_TOKENS_PER_MINUTE,
        Metric.OUTPUT_TOKENS_PER_MINUTE,
        Metric.TOKENS_PER_MINUTE,
    ),
    WindowKind.DAY: (Metric.TOKENS_PER_DAY,),
    WindowKind.MONTH: (Metric.TOKENS_PER_MONTH,),
}
# Which of ``Windows`` a level's are; keys have the tenant's.
ORGANISATION_PLACES = {WindowKind.MINUTE: 0, WindowKind.DAY: 1, WindowKind.MONTH: 2}
TENANT_PLACES = {WindowKind.MINUTE: 0, WindowKind.DAY: 3, WindowKind.MONTH: 4}
FLOW, WINDOW = 2, 9  # numbers of a bucket, and of each of its windows, in a row
_KINDS = {
    chosen: tuple(kind for kind, is_chosen in zip(KINDS, chosen, strict=True) if is_chosen)
    for chosen in product((False, True), repeat=len(KINDS))
}


class Cost(NamedTuple):
    """Requests and tokens: what a claim adds to a bucket, or what one of its counters holds.

    A named tuple, like the others here that are made a dozen times a claim: a frozen dataclass takes longer to make.
    """

    requests: int = 0
    input: int = 0
    output: int = 0

    @property
    def tokens(self) -> int:
        return self.input + self.output

    def plus(self, other: Cost) -> Cost:
        return Cost(self.requests + other.requests, self.input + other.input, self.output + other.output)

    def less(self, other: Cost) -> Cost:
        return Cost(self.requests - other.requests, self.input - other.input, self.output - other.output)

    def above(self, other: Cost) -> Cost:
        """What this has more than ``other``, nothing below zero."""
        return Cost(
            max(0, self.requests - other.requests),
            max(0, self.input - other.input),
            max(0, self.output - other.output),
        )

    def of(self, metric: Metric) -> int:
        """The part that a window's metric counts."""
        if metric is Metric.REQUESTS_PER_MINUTE:
            return self.requests
        if metric is Metric.INPUT_TOKENS_PER_MINUTE:
            return self.input
        if metric is Metric.OUTPUT_TOKENS_PER_MINUTE:
            return self.output
        return self.tokens


NO_COST = Cost()


@dataclass(frozen=True, slots=True)
class Charge:
    """What an admission comes to, in the units of ``Delivered`` and ``Prices``."""

    requests: int = 0
    input: int = 0
    cached: int = 0
    output: int = 0
    cost: int = 0
    energy: int = 0

    @classmethod
    def of(cls, delivered: Delivered, prices: Prices) -> Charge:
        """One request and what it was delivered."""
        tokens = delivered.input_tokens, delivered.cached_tokens, delivered.output_tokens
        return cls(1, *tokens, delivered.cost(prices), delivered.energy_millijoules)

    def above(self, before: Charge) -> Charge:
        """What is still to be charged after ``before`` was."""
        return Charge(
            max(0, self.requests - before.requests),
            max(0, self.input - before.input),
            max(0, self.cached - before.cached),
            max(0, self.output - before.output),
            max(0, self.cost - before.cost),
            max(0, self.energy - before.energy),
        )

    def covering(self, other: Charge) -> Charge:
        """The least that is no part less than this or ``other``."""
        return self.above(other).plus(other)

    def plus(self, other: Charge) -> Charge:
        return Charge(
            self.requests + other.requests,
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.cost + other.cost,
            self.energy + other.energy,
        )

    @property
    def counted(self) -> Cost:
        """The part that buckets count."""
        return Cost(self.requests, self.input, self.output)


NO_CHARGE = Charge()


class Scope(NamedTuple):
    """Whose counters: ``model`` empty for all models together."""

    level: Level
    subject: str
    model: str = ""

    @property
    def name(self) -> str:
        """Unique in the organisation. The model, which may hold any character, comes last."""
        return f"{self.level}:{self.subject}:{self.model}"


class Bucket(NamedTuple):
    """What one scope counts: windows of ``kinds``, and requests in progress if ``has_flow``."""

    scope: Scope
    limits: Limits
    kinds: tuple[WindowKind, ...]
    has_flow: bool

    def place(self, kind: WindowKind) -> int:
        """Which of ``Windows`` it counts in."""
        return (ORGANISATION_PLACES if self.scope.level is Level.ORGANISATION else TENANT_PLACES)[kind]

    @property
    def interval(self) -> int:
        """Microseconds in which one request of the burst is refilled, rounded up: never faster than the limit."""
        return -(-MINUTE // (self.limits.requests_per_minute or 1))

    def alert_limit(self, kind: WindowKind) -> int | None:
        """Days and months warn before they are used up; a minute is over before anybody reads it."""
        return None if kind is WindowKind.MINUTE else self.limits.of(METRICS[kind][0]) or None


class WindowCounters(NamedTuple):
    """What is used and reserved together, then what of it is used."""

    requests: int = 0
    input: int = 0
    output: int = 0
    requests_used: int = 0
    input_used: int = 0
    output_used: int = 0

    @property
    def used(self) -> Cost:
        return Cost(self.requests_used, self.input_used, self.output_used)

    @property
    def reserved(self) -> Cost:
        return self.total.less(self.used)

    @property
    def total(self) -> Cost:
        return Cost(self.requests, self.input, self.output)

    def holding(self, cost: Cost) -> WindowCounters:
        """With ``cost`` reserved."""
        return WindowCounters(*self.total.plus(cost), *self.used)

    def moved(self, held: Cost, used: Cost) -> WindowCounters:
        """With ``used`` in place of what was held."""
        return WindowCounters(*self.total.less(held).plus(used), *self.used.plus(used))


class FlowCounters(NamedTuple):
    """``arrival``: when the burst will be whole again, Unix microseconds (GCRA's theoretical arrival time)."""

    running: int = 0
    arrival: int = 0


class Counters(NamedTuple):
    """Of one bucket, its windows in the order of its kinds."""

    windows: tuple[WindowCounters, ...]
    flow: FlowCounters = FlowCounters()


def in_row(counters: Sequence[Counters]) -> list[int]:
    """As the scripts have them, ``FLOW`` numbers of a bucket and ``WINDOW`` of each of its windows; 0 for what these
    count besides."""
    row: list[int] = []
    for held in counters:
        row += held.flow
        for counted in held.windows:
            row += (0, *counted, 0, 0)
    return row


def buckets_of(account: Account, model: str) -> tuple[Bucket, ...]:
    """What a request of ``model`` draws on."""
    found: list[Bucket] = []
    for scope, limits in _scopes(account, model):
        is_tenant = scope.level is Level.TENANT and not scope.model
        has_flow = is_tenant or limits.concurrency is not None or limits.burst is not None
        kinds = _kinds(limits, is_tenant)
        if kinds or has_flow:
            found.append(Bucket(scope, limits, kinds, has_flow))
    return tuple(found)


def _kinds(limits: Limits, is_tenant: bool) -> tuple[WindowKind, ...]:
    """One of ``_KINDS``: plans by the thousand share them."""
    has_minute = (
        limits.requests_per_minute is not None
        or limits.input_tokens_per_minute is not None
        or limits.output_tokens_per_minute is not None
        or limits.tokens_per_minute is not None
    )
    has_day, has_month = limits.tokens_per_day is not None, limits.tokens_per_month is not None
    return _KINDS[has_minute, is_tenant or has_day, is_tenant or has_month]


def _scopes(account: Account, model: str) -> Iterator[tuple[Scope, Limits]]:
    organisation, tenant, key = account.organisation, account.tenant, account.key
    levels = (
        (Level.ORGANISATION, organisation.name, organisation),
        (Level.TENANT, tenant.name, tenant),
        (Level.KEY, key.id, key),
    )
    for level, subject, rules in levels:
        yield Scope(level, subject), rules.limits
        for rule in rules.model_limits:
            if rule.model == model:
                yield Scope(level, subject, model), rule.limits
