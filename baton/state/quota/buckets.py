"""From a claim to the buckets that it draws on, and what they count.

A bucket is one level's counters, for one model or all, in one window (``WindowBucket``) or without one (``FlowBucket``:
requests in progress, and the burst). Counters exist for every limit, and for a tenant's days, months and requests in
progress without one, so that a limit set later finds what was used before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.types import (
    Account,
    Delivered,
    Level,
    Limits,
    Metric,
    Prices,
)
from baton.state.quota.windows import MINUTE, Window, WindowKind

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
        return f"{self.level}:{self.subject}:{self.model}"


class WindowBucket(NamedTuple):
    scope: Scope
    limits: Limits
    window: Window

    @property
    def name(self) -> str:
        """Unique in the organisation. The model, which may hold any character, comes last."""
        return f"{self.window.name}:{self.scope.name}"

    @property
    def field(self) -> str:
        return self.window.name

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return METRICS[self.window.kind]

    @property
    def alert_limit(self) -> int | None:
        """Days and months warn before they are used up; a minute is over before anybody reads it."""
        return None if self.window.kind is WindowKind.MINUTE else self.limits.of(self.metrics[0]) or None


class FlowBucket(NamedTuple):
    scope: Scope
    limits: Limits

    @property
    def name(self) -> str:
        return f"flow:{self.scope.name}"

    @property
    def field(self) -> str:
        return "flow"

    @property
    def burst(self) -> int | None:
        return self.limits.burst

    @property
    def interval(self) -> int:
        """Microseconds in which one request of the burst is refilled, rounded up: never faster than the limit."""
        return -(-MINUTE // (self.limits.requests_per_minute or 1))


class WindowCounters(NamedTuple):
    """A day and a month may count tokens alone, as input."""

    used: Cost = NO_COST
    reserved: Cost = NO_COST


class FlowCounters(NamedTuple):
    """``arrival``: when the burst will be whole again, Unix microseconds (GCRA's theoretical arrival time)."""

    running: int = 0
    arrival: int = 0


@dataclass(frozen=True, slots=True)
class Buckets:
    """All buckets of one claim at one moment. ``scopes``: the same ones by scope, windows before the flow."""

    windows: tuple[WindowBucket, ...]
    flows: tuple[FlowBucket, ...]
    scopes: tuple[tuple[Scope, tuple[WindowBucket | FlowBucket, ...]], ...]

    def replaced(self, windows: tuple[WindowBucket, ...], flows: tuple[FlowBucket, ...]) -> Buckets:
        """Others in the places of these."""
        window, flow = iter(windows), iter(flows)
        scopes = tuple(
            (scope, tuple(next(window) if isinstance(bucket, WindowBucket) else next(flow) for bucket in buckets))
            for scope, buckets in self.scopes
        )
        return Buckets(windows, flows, scopes)

    @property
    def has_shadow(self) -> bool:
        return any(bucket.limits.shadow for bucket in (*self.windows, *self.flows))


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of ``Buckets``, in its order."""

    windows: tuple[WindowCounters, ...]
    flows: tuple[FlowCounters, ...]


def buckets_of(account: Account, model: str, window: Callable[[WindowKind, str], Window]) -> Buckets:
    """What a request of ``model`` draws on. ``window`` gives the current one of a kind in a time zone."""
    windows: list[WindowBucket] = []
    flows: list[FlowBucket] = []
    scopes: list[tuple[Scope, tuple[WindowBucket | FlowBucket, ...]]] = []
    for scope, limits, zone in _scopes(account, model):
        is_tenant = scope.level is Level.TENANT and not scope.model
        counted = [WindowBucket(scope, limits, window(kind, zone)) for kind in _kinds(limits, is_tenant)]
        flow = is_tenant or limits.concurrency is not None or limits.burst is not None
        bounded = [FlowBucket(scope, limits)] if flow else []
        windows += counted
        flows += bounded
        if counted or bounded:
            scopes.append((scope, (*counted, *bounded)))
    return Buckets(tuple(windows), tuple(flows), tuple(scopes))


def _kinds(limits: Limits, is_tenant: bool) -> Iterator[WindowKind]:
    for kind, metrics in METRICS.items():
        if is_tenant and kind is not WindowKind.MINUTE:
            yield kind
            continue
        for metric in metrics:
            if limits.of(metric) is not None:
                yield kind
                break


def _scopes(account: Account, model: str) -> Iterator[tuple[Scope, Limits, str]]:
    organisation, tenant, key = account.organisation, account.tenant, account.key
    levels = (
        (Level.ORGANISATION, organisation.name, organisation, organisation.time_zone),
        (Level.TENANT, tenant.name, tenant, tenant.time_zone),
        (Level.KEY, key.id, key, tenant.time_zone),
    )
    for level, subject, rules, zone in levels:
        yield Scope(level, subject), rules.limits, zone
        for rule in rules.model_limits:
            if rule.model == model:
                yield Scope(level, subject, model), rule.limits, zone
