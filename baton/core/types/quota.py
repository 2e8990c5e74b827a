"""Admission to a request's quotas: what it claims, how it is answered, what it used in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from baton.core.types.tenancy import FREE, Account, Level, Metric, Prices


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a request got, all its choices and hops together. ``cached_tokens`` is part of ``input_tokens``."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    energy_millijoules: int = 0

    def cost(self, prices: Prices) -> int:
        """In the unit of ``Prices``."""
        computed = self.input_tokens - self.cached_tokens
        tokens = computed * prices.input + self.cached_tokens * prices.cached + self.output_tokens * prices.output
        return tokens + self.energy_millijoules * prices.joule // 1000


NOTHING_DELIVERED = Delivered()


@dataclass(frozen=True, slots=True)
class QuotaClaim:
    """What a request needs at most: its prompt, once, and the most tokens that all its choices may bring.

    ``owner`` names the one admission that may renew and settle the reservation; a later claim with the same request id
    and size (a client that resumes elsewhere) takes the reservation over and is charged nothing anew.
    """

    request_id: str
    owner: str
    account: Account
    model: str
    input_tokens: int
    output_tokens: int
    prices: Prices = FREE
    lease_seconds: float = 15.0


@dataclass(frozen=True, slots=True)
class QuotaRefusal:
    """One limit that a claim would break, or broke under a shadowed rule. ``model`` empty: all models together.

    ``retry_after`` in seconds, when the claim may fit; None: it is larger than the limit and never will.
    """

    level: Level
    subject: str
    model: str
    metric: Metric
    limit: int
    used: int
    reserved: int
    requested: int
    retry_after: float | None

    def __str__(self) -> str:
        model = f" for model {self.model!r}" if self.model else ""
        figures = f"limit {self.limit}, used {self.used}, reserved {self.reserved}, requested {self.requested}"
        wait = "can never fit" if self.retry_after is None else f"retry after {self.retry_after:.3f} s"
        return f"{self.level} {self.subject!r}{model}: {self.metric}: {figures}; {wait}"


class QuotaBalance(NamedTuple):
    """One limit as it stands. ``limit`` None: only counted. ``resets_after`` in seconds; None: not by time.

    A named tuple, since two dozen of them are made for each request.
    """

    level: Level
    subject: str
    model: str
    metric: Metric
    limit: int | None
    used: int
    reserved: int
    resets_after: float | None

    @property
    def remaining(self) -> int | None:
        return None if self.limit is None else max(0, self.limit - self.used - self.reserved)


@dataclass(frozen=True, slots=True)
class QuotaGrant:
    """A reservation was made. ``balances`` are those after it; ``shadowed`` what shadowed rules would have refused."""

    balances: Sequence[QuotaBalance]
    shadowed: tuple[QuotaRefusal, ...] = ()
    taken_over: bool = False


class SettleOutcome(StrEnum):
    """A reservation is settled once; a second settlement says so, and changes nothing of it."""

    SETTLED = "settled"
    ALREADY = "already"
    SUPERSEDED = "superseded"  # another admission took the request over: what this one delivered is charged with its


@dataclass(frozen=True, slots=True)
class Progress:
    """What an open reservation has been delivered so far; should its gateway die, this is what it is charged."""

    request_id: str
    tenant: str
    owner: str
    delivered: Delivered


class LeaseState(StrEnum):
    """What became of a reservation whose lease somebody wants to renew."""

    RENEWED = "renewed"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"  # charged for its last progress; settling it charges the rest
    MISSING = "missing"


class LedgerReason(StrEnum):
    """Why the ledger has an entry."""

    SETTLED = "settled"
    EXPIRED = "expired"  # the lease ran out: what was delivered as far as its gateway told
    LATE = "late"  # told or settled after it had ended: the difference
    UNRESERVED = "unreserved"  # served while the shared counters were away


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What was charged, once and for all. ``debited_at`` (Unix microseconds) tells in which windows it counts.

    ``cost`` is in the unit of ``Prices``. A request has more than one entry only if its lease ran out before it was
    settled; their sums are what it used.
    """

    id: str
    debited_at: int
    reason: LedgerReason
    request_id: str
    tenant: str
    key_id: str
    model: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: int
    energy_millijoules: int


def ledger_position(entry_id: str) -> tuple[int, int]:
    """What ids of ledger entries are ordered by: Unix milliseconds, and a count within them. "" is before the first."""
    milliseconds, _, count = entry_id.partition("-")
    return (int(milliseconds), int(count or 0)) if entry_id else (-1, 0)


@dataclass(frozen=True, slots=True)
class LedgerExtent:
    """What of an organisation's ledger is here. ``oldest``: the id of the first entry, "" for none.

    ``trimmed``: entries written up to then (Unix milliseconds) may have been trimmed; 0: none ever was.
    """

    entries: int
    oldest: str
    trimmed: int


@dataclass(frozen=True, slots=True)
class QuotaAlert:
    """A daily or monthly limit was used to ``percent`` (50, 80 or 100); told once a window.

    100 also when a claim was refused for it. ``window_start`` in Unix microseconds. Ids are as in the ledger.
    """

    level: Level
    subject: str
    model: str
    metric: Metric
    window_start: int
    percent: int
    limit: int
    used: int
    id: str = ""

    @property
    def at(self) -> float:
        """When it was told, seconds since the Unix epoch."""
        return ledger_position(self.id)[0] / 1000
