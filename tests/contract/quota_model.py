"""A reference for quotas that keeps no counter: it adds up all that ever happened each time it is asked.

It knows nothing of buckets, scripts or time zones: windows are minutes and UTC days of the test's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.core.types import Delivered, KeyRecord, Level, Metric, Organisation, QuotaClaim, Tenant

MINUTE, DAY = 60, 86_400
METRICS = {
    Metric.REQUESTS_PER_MINUTE: MINUTE,
    Metric.INPUT_TOKENS_PER_MINUTE: MINUTE,
    Metric.OUTPUT_TOKENS_PER_MINUTE: MINUTE,
    Metric.TOKENS_PER_MINUTE: MINUTE,
    Metric.TOKENS_PER_DAY: DAY,
}


@dataclass
class Booking:
    """One admission. ``paid`` is its part of the ledger, (requests, input, output); ``held`` what it reserves."""

    claim: QuotaClaim
    made_at: float
    lease_end: float
    held: tuple[int, int, int]
    before: tuple[int, int, int] = (0, 0, 0)  # paid by an earlier life of the request
    paid: tuple[int, int, int] = (0, 0, 0)
    progress: tuple[int, int, int] = (1, 0, 0)
    state: str = "open"
    former: frozenset[str] = frozenset()  # owners whose place another one has taken

    def tell(self, delivered: Delivered) -> None:
        told = (1, delivered.input_tokens, delivered.output_tokens)
        if above(self.progress, told) == (0, 0, 0):
            self.progress = told

    def pay(self, total: tuple[int, int, int], state: str) -> None:
        already = add(self.before, self.paid)
        self.paid = add(self.paid, above(total, already))
        self.held, self.state = (0, 0, 0), state

    def supersede(self) -> None:
        self.former |= {self.claim.owner}


def add(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def above(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return max(0, a[0] - b[0]), max(0, a[1] - b[1]), max(0, a[2] - b[2])


def part(amount: tuple[int, int, int], metric: Metric) -> int:
    parts = {
        Metric.REQUESTS_PER_MINUTE: amount[0],
        Metric.INPUT_TOKENS_PER_MINUTE: amount[1],
        Metric.OUTPUT_TOKENS_PER_MINUTE: amount[2],
    }
    return parts.get(metric, amount[1] + amount[2])


class QuotaModel:
    def __init__(self) -> None:
        self.bookings: list[Booking] = []

    def expire(self, now: float) -> None:
        for booking in self.bookings:
            if booking.state == "open" and booking.lease_end <= now:
                booking.pay(booking.progress, "expired")

    def reserve(self, claim: QuotaClaim, now: float) -> str:
        """granted, taken, refused or in_use."""
        self.expire(now)
        latest = self.latest(claim)
        same_size = latest is not None and size(latest.claim) == size(claim)
        if latest is not None and latest.state == "open":
            if not same_size:
                return "in_use"
            latest.supersede()
            latest.claim = replace(latest.claim, owner=claim.owner)  # whoever began it pays
            latest.lease_end = now + claim.lease_seconds
            return "taken"
        resumes = latest is not None and latest.state == "expired" and same_size
        before = add(latest.before, latest.paid) if latest is not None and resumes else (0, 0, 0)
        cost = above((1, claim.input_tokens, claim.output_tokens), before)
        if any(self._breaks(claim, level, cost, now) for level in Level):
            return "refused"
        made = Booking(claim, now, now + claim.lease_seconds, cost, before)
        if latest is not None and latest.state == "expired":
            latest.supersede()
            latest.state, made.former = "over", latest.former if resumes else frozenset()
        self.bookings.append(made)
        return "granted"

    def settle(self, claim: QuotaClaim, delivered: Delivered) -> bool:
        """Nothing for an admission that is over. Whether it came after the lease."""
        booking = self.latest(claim)
        if booking is None or booking.claim.owner != claim.owner or booking.state == "over":
            return self.tell_late(claim, delivered)
        is_late = booking.state == "expired"
        booking.pay(booking.progress, "expired")  # what an earlier owner told is never lowered
        booking.pay((1, delivered.input_tokens, delivered.output_tokens), "over")
        return is_late

    def charge(self, claim: QuotaClaim, delivered: Delivered, now: float) -> None:
        """Of an admission that nobody reserved for; the account of one that is still known is its owner's."""
        latest = self.latest(claim)
        if latest is None or latest.state == "over":
            paid = (1, delivered.input_tokens, delivered.output_tokens)
            self.bookings.append(Booking(claim, now, now, (0, 0, 0), paid=paid, state="over"))

    def release(self, claim: QuotaClaim) -> None:
        booking = self.latest(claim)
        if booking is not None and booking.claim.owner == claim.owner and booking.state != "over":
            is_owed = booking.progress != (1, 0, 0) or add(booking.before, booking.paid) != (0, 0, 0)
            may_go_on = is_owed or bool(booking.former)
            booking.pay(booking.progress if is_owed else (0, 0, 0), "expired" if may_go_on else "over")

    def tell_late(self, claim: QuotaClaim, delivered: Delivered) -> bool:
        """By an owner whose place another one has taken. Whether it came after the end."""
        found = [b for b in self.bookings if same_request(b.claim, claim) and claim.owner in b.former]
        if not found or (delivered.input_tokens, delivered.output_tokens) == (0, 0):
            return False
        found[-1].tell(delivered)
        if found[-1].state != "open":
            found[-1].pay(found[-1].progress, found[-1].state)
        return found[-1].state != "open"

    def renew(self, claim: QuotaClaim, delivered: Delivered, now: float) -> bool:
        """Whether it told of one that has ended."""
        booking = self.latest(claim)
        if booking is None or booking.claim.owner != claim.owner or booking.state == "over":
            return self.tell_late(claim, delivered)
        if booking.state == "open":
            booking.tell(delivered)
            booking.lease_end = now + claim.lease_seconds
        return False

    def recover(self, claim: QuotaClaim, delivered: Delivered) -> bool:
        """Whether the admission is still this owner's, open or expired."""
        booking = self.latest(claim)
        if booking is None or booking.claim.owner != claim.owner or booking.state == "over":
            self.tell_late(claim, delivered)
            return False
        booking.tell(delivered)
        if booking.state == "expired":
            booking.pay(booking.progress, "expired")
        return True

    def latest(self, claim: QuotaClaim) -> Booking | None:
        same = [b for b in self.bookings if same_request(b.claim, claim)]
        return same[-1] if same else None

    def sums(self, claim: QuotaClaim, level: Level, metric: Metric, now: float) -> tuple[int, int]:
        """(used, reserved) in the current window of ``metric``."""
        length = METRICS[metric]
        found = [b for b in self._of(claim, level) if b.made_at // length == now // length]
        return sum(part(b.paid, metric) for b in found), sum(part(b.held, metric) for b in found)

    def running(self, claim: QuotaClaim, level: Level) -> int:
        return sum(booking.state == "open" for booking in self._of(claim, level))

    def _of(self, claim: QuotaClaim, level: Level) -> Iterator[Booking]:
        return (booking for booking in self.bookings if who(booking.claim, level) == who(claim, level))

    def _breaks(self, claim: QuotaClaim, level: Level, cost: tuple[int, int, int], now: float) -> bool:
        limits = holder(claim, level).limits
        if limits.concurrency is not None and self.running(claim, level) + 1 > limits.concurrency:
            return True
        for metric in METRICS:
            limit, asked = limits.of(metric), part(cost, metric)
            if limit is not None and asked > 0 and sum(self.sums(claim, level, metric, now)) + asked > limit:
                return True
        return False


def holder(claim: QuotaClaim, level: Level) -> Organisation | Tenant | KeyRecord:
    payer = claim.account
    return {Level.ORGANISATION: payer.organisation, Level.TENANT: payer.tenant, Level.KEY: payer.key}[level]


def who(claim: QuotaClaim, level: Level) -> str:
    found = holder(claim, level)
    return found.id if isinstance(found, KeyRecord) else found.name


def size(claim: QuotaClaim) -> tuple[int, int]:
    return claim.input_tokens, claim.output_tokens


def same_request(a: QuotaClaim, b: QuotaClaim) -> bool:
    return (who(a, Level.TENANT), a.request_id) == (who(b, Level.TENANT), b.request_id)
