"""What quotas of one process keep of an organisation: its counters, its reservations, its ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from baton.core.types import NOTHING_DELIVERED, Delivered, LedgerEntry, QuotaAlert, QuotaClaim, SettleOutcome
from baton.state.quota.buckets import NO_COST, Bucket, Charge, Cost, FlowCounters, WindowCounters
from baton.state.quota.windows import Window, Windows


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a claim draws on."""

    buckets: tuple[Bucket, ...]
    windows: Windows

    @property
    def counted(self) -> Iterator[tuple[str, Bucket, Window]]:
        """Each window of each bucket, and the name of its counters."""
        for bucket in self.buckets:
            for kind in bucket.kinds:
                window = self.windows.each[bucket.place(kind)]
                yield f"{window.name}:{bucket.scope.name}", bucket, window

    @property
    def flows(self) -> Iterator[tuple[str, Bucket]]:
        return ((bucket.scope.name, bucket) for bucket in self.buckets if bucket.has_flow)


@dataclass(slots=True)
class CountedWindow:
    """``warned``: the highest percentage alerted. ``bucket`` as the latest claim brought it."""

    bucket: Bucket
    window: Window
    counters: WindowCounters = WindowCounters()
    warned: int = 0


@dataclass(slots=True)
class Reservation:
    """``cost`` is what it holds, ``charged`` what an ended lease of it was charged. Times in Unix microseconds.
    ``first`` is the owner that the admission began with."""

    claim: QuotaClaim
    drawn: Drawn
    cost: Cost
    charged: Charge
    debited_at: int
    lease_end: int
    first: str
    progress: Delivered = NOTHING_DELIVERED
    is_open: bool = True

    @property
    def was_taken_over(self) -> bool:
        return self.first != self.claim.owner

    def tell(self, delivered: Delivered) -> None:
        """Note it as progress. Who tells less than is known is late, or has taken the request over and delivered
        nothing of its own yet."""
        known = self.progress
        if delivered.input_tokens >= known.input_tokens and delivered.output_tokens >= known.output_tokens:
            energy = max(known.energy_millijoules, delivered.energy_millijoules)
            self.progress = replace(delivered, energy_millijoules=energy)

    def end(self, total: Charge) -> None:
        """It was charged ``total``, if no more before, and holds nothing."""
        self.charged = total.covering(self.charged)
        self.cost, self.is_open = NO_COST, False

    def was_told_more(self, total: Charge) -> bool:
        """Than ``total``: by an earlier owner."""
        return total.input < self.progress.input_tokens or total.output < self.progress.output_tokens


@dataclass(frozen=True, slots=True)
class Ended:
    """How an admission ended. ``first`` is the first owner of the one that it was taken over with, if any."""

    outcome: SettleOutcome
    until: int
    first: str | None = None


@dataclass(slots=True)
class Books:
    """One organisation's. ``ended`` remembers how admissions ended, by member and owner; ``succeeded`` what became of
    reservations that had several owners, by member and the first of them, and until when."""

    windows: dict[str, CountedWindow] = field(default_factory=dict[str, CountedWindow])
    flows: dict[str, FlowCounters] = field(default_factory=dict[str, FlowCounters])
    reservations: dict[str, Reservation] = field(default_factory=dict[str, Reservation])
    ended: dict[tuple[str, str], Ended] = field(default_factory=dict[tuple[str, str], Ended])
    succeeded: dict[tuple[str, str], tuple[Reservation, int]] = field(
        default_factory=dict[tuple[str, str], tuple[Reservation, int]]
    )
    ledger: list[LedgerEntry] = field(default_factory=list[LedgerEntry])
    alerts: list[QuotaAlert] = field(default_factory=list[QuotaAlert])
    entries: int = 0
    warnings: int = 0
    trimmed: int = 0
    tidied: int = 0
