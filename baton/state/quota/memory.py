"""Quotas of one process: the twin of ``SharedQuota``, and what a gateway counts with while Redis is away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from baton.core.clock import Clock
from baton.core.errors import QuotaExceeded
from baton.core.types import (
    Account,
    Delivered,
    LeaseState,
    LedgerEntry,
    LedgerExtent,
    LedgerReason,
    Progress,
    QuotaAlert,
    QuotaBalance,
    QuotaClaim,
    QuotaGrant,
    SettleOutcome,
    ledger_position,
)
from baton.state.quota.books import Books, CountedWindow, Drawn, Ended, Reservation
from baton.state.quota.buckets import (
    METRICS,
    NO_CHARGE,
    NO_COST,
    Bucket,
    Charge,
    Cost,
    Counters,
    FlowCounters,
    WindowCounters,
    buckets_of,
)
from baton.state.quota.claims import check_claim, has_ended, member_of, size_in_use
from baton.state.quota.verdict import alert_percent, balances, debited, judge
from baton.state.quota.windows import MICROSECONDS, MINUTE, Calendar, Window, Windows

WINDOW_KEPT = 2 * MINUTE  # after its end
EXPIRED_KEPT = 24 * 60 * MINUTE
Terms = Callable[[str, tuple[Bucket, ...], Windows, Sequence[Counters]], tuple[Bucket, ...]]


def as_claimed(
    _organisation: str, buckets: tuple[Bucket, ...], _windows: Windows, _counted: Sequence[Counters]
) -> tuple[Bucket, ...]:
    return buckets


class MemoryQuota:
    """Implements ``QuotaApi`` and ``LedgerApi``. Time is the wall time of the clock.

    ``kept_entries``: how many entries of each organisation's ledger and alerts are kept; None: all. ``terms`` gives an
    organisation's buckets the limits that hold here, for what they count.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        remember_seconds: float = 600.0,
        kept_entries: int | None = None,
        terms: Terms = as_claimed,
    ) -> None:
        self._clock = clock
        self._terms = terms
        self._calendar = Calendar()
        self._remember = round(remember_seconds * MICROSECONDS)
        self._kept_entries = kept_entries
        self._books: dict[str, Books] = {}

    async def reserve(self, claim: QuotaClaim) -> QuotaGrant:
        member = check_claim(claim)
        books, now = self._of(claim), self._now()
        self._expire_due(books, now)
        if self._ended(books, member, claim.owner) is not None:
            raise has_ended(claim)
        drawn = self._drawn(claim.account, claim.model, now)
        known = books.reservations.get(member)
        same_size = known is not None and _size(known.claim) == _size(claim)
        if known is not None and known.is_open:
            if not same_size:
                raise size_in_use(claim)
            return self._take_over(books, known, claim, drawn, now)
        charged = known.charged if known is not None and same_size else NO_CHARGE
        cost = Cost(1, claim.input_tokens, claim.output_tokens).above(charged.counted)
        verdict = judge(drawn.buckets, drawn.windows, _counters(books, drawn), cost, now)
        if verdict.refused:
            self._warn_exhausted(books, drawn, cost)
            raise QuotaExceeded.of(verdict.refused)
        for name, bucket, window in drawn.counted:
            opened = _opened(books, name, bucket, window)
            opened.counters = opened.counters.holding(cost)
        for name, bucket in drawn.flows:
            flow = books.flows.get(name, FlowCounters())
            books.flows[name] = debited(bucket, flow, cost.requests, now)
        first = claim.owner
        if known is not None and same_size:
            first = known.first
        if known is not None and known.claim.owner != claim.owner:
            books.ended[member, known.claim.owner] = Ended(SettleOutcome.SUPERSEDED, now + self._remember, known.first)
            if not same_size:
                books.succeeded[member, known.first] = known, now + self._remember
        lease_end = now + round(claim.lease_seconds * MICROSECONDS)
        books.reservations[member] = Reservation(claim, drawn, cost, charged, now, lease_end, first)
        return QuotaGrant(_standing(books, drawn, now), verdict.shadowed)

    async def renew(self, organisation: str, progress: Sequence[Progress], lease_seconds: float) -> list[LeaseState]:
        books = self._books.setdefault(organisation, Books())
        return [self._renew(books, each, lease_seconds) for each in progress]

    async def recover(self, organisation: str, progress: Sequence[Progress]) -> int:
        books = self._books.setdefault(organisation, Books())
        return sum([self._recover(books, each) for each in progress])

    async def settle(self, claim: QuotaClaim, delivered: Delivered) -> SettleOutcome:
        return self._end(claim, delivered)

    async def release(self, claim: QuotaClaim) -> SettleOutcome:
        return self._end(claim, None)

    async def expire(self) -> int:
        now = self._now()
        return sum(self._expire_due(books, now) for books in self._books.values())

    async def balances(self, account: Account, model: str) -> tuple[QuotaBalance, ...]:
        books, now = self._books.setdefault(account.organisation.name, Books()), self._now()
        return _standing(books, self._drawn(account, model, now), now)

    async def entries(self, organisation: str, after: str = "", limit: int = 1000) -> Sequence[LedgerEntry]:
        ledger = self._books.setdefault(organisation, Books()).ledger
        return [entry for entry in ledger if ledger_position(entry.id) > ledger_position(after)][:limit]

    async def alerts(self, organisation: str, after: str = "", limit: int = 1000) -> Sequence[QuotaAlert]:
        alerts, last = self._books.setdefault(organisation, Books()).alerts, ledger_position(after)
        return [alert for alert in alerts if ledger_position(alert.id) > last][:limit]

    async def organisations(self) -> AsyncIterator[str]:
        for name in [name for name, books in self._books.items() if books.entries]:
            yield name

    async def extent(self, organisation: str) -> LedgerExtent:
        books = self._books.setdefault(organisation, Books())
        return LedgerExtent(len(books.ledger), books.ledger[0].id if books.ledger else "", books.trimmed)

    async def trim(self, organisation: str, through: str) -> None:
        books, last = self._books.setdefault(organisation, Books()), ledger_position(through)
        books.ledger = [entry for entry in books.ledger if ledger_position(entry.id) > last]
        books.trimmed = max(books.trimmed, last[0])

    # --- one step of each -------------------------------------------------------------------------------------------

    def _take_over(self, books: Books, known: Reservation, claim: QuotaClaim, drawn: Drawn, now: int) -> QuotaGrant:
        member = check_claim(claim)
        if known.claim.owner != claim.owner:
            books.ended[member, known.claim.owner] = Ended(SettleOutcome.SUPERSEDED, now + self._remember, known.first)
            known.claim = replace(known.claim, owner=claim.owner)
        known.lease_end = now + round(claim.lease_seconds * MICROSECONDS)
        return QuotaGrant(_standing(books, drawn, now), taken_over=True)

    def _renew(self, books: Books, progress: Progress, lease_seconds: float) -> LeaseState:
        member = member_of(progress.tenant, progress.request_id)
        known = books.reservations.get(member)
        if known is None or known.claim.owner != progress.owner:
            is_superseded = self._note_superseded(books, member, progress.owner, progress.delivered)
            return LeaseState.MISSING if known is None and not is_superseded else LeaseState.SUPERSEDED
        if not known.is_open:
            return LeaseState.EXPIRED
        known.tell(progress.delivered)
        known.lease_end = self._now() + round(lease_seconds * MICROSECONDS)
        return LeaseState.RENEWED

    def _recover(self, books: Books, progress: Progress) -> bool:
        """Whether the reservation is still its own."""
        member = member_of(progress.tenant, progress.request_id)
        known = books.reservations.get(member)
        if known is None or known.claim.owner != progress.owner:
            self._note_superseded(books, member, progress.owner, progress.delivered)
            return False
        self._note(books, known, progress.delivered)
        return True

    def _note(self, books: Books, known: Reservation, delivered: Delivered) -> None:
        """Of a reservation that has ended it is charged at once."""
        known.tell(delivered)
        if not known.is_open:
            self._lapse(books, known, LedgerReason.LATE)

    def _note_superseded(self, books: Books, member: str, owner: str, delivered: Delivered) -> bool:
        """Note what an owner had delivered when another one took its place; whether one did."""
        ended = self._ended(books, member, owner)
        if ended is None or ended.outcome is not SettleOutcome.SUPERSEDED:
            return False
        if ended.first is None or (delivered.input_tokens, delivered.output_tokens) == (0, 0):
            return True
        known = books.reservations.get(member)
        if known is None or known.first != ended.first:  # that admission has ended, and the id may be another one's
            known, until = books.succeeded.get((member, ended.first), (None, 0))
            known = known if self._now() < until else None
        if known is not None:
            self._note(books, known, delivered)
        return True

    def _end(self, claim: QuotaClaim, delivered: Delivered | None) -> SettleOutcome:
        """Without ``delivered`` a release."""
        member, books, now = check_claim(claim), self._of(claim), self._now()
        total = NO_CHARGE if delivered is None else Charge.of(delivered, claim.prices)
        known = books.reservations.get(member)
        ended = self._ended(books, member, claim.owner)
        if known is not None and known.claim.owner == claim.owner:
            reason = LedgerReason.SETTLED if known.is_open else LedgerReason.LATE
            if known.was_told_more(total) or (delivered is None and known.charged != NO_CHARGE):
                self._lapse(books, known, reason)
                if delivered is None:
                    return SettleOutcome.SETTLED
            self._close(books, known, total, reason)
            known.end(total)
            if known.was_taken_over and delivered is None:
                return SettleOutcome.SETTLED  # what its former owners tell late is part of what the client goes on with
            del books.reservations[member]
            if known.was_taken_over:
                books.succeeded[member, known.first] = known, now + self._remember
            outcome = SettleOutcome.SETTLED
        elif ended is not None:
            if delivered is not None:
                self._note_superseded(books, member, claim.owner, delivered)
            return ended.outcome
        elif known is not None:
            books.ended[member, claim.owner] = Ended(SettleOutcome.SUPERSEDED, now + self._remember)
            return SettleOutcome.SUPERSEDED
        elif delivered is not None:
            self._charge(books, claim, total, now)
            outcome = SettleOutcome.SETTLED
        else:
            outcome = SettleOutcome.ALREADY
        books.ended[member, claim.owner] = Ended(SettleOutcome.ALREADY, now + self._remember)
        return outcome

    def _ended(self, books: Books, member: str, owner: str) -> Ended | None:
        """How an admission ended, as long as that is remembered."""
        ended = books.ended.get((member, owner))
        return ended if ended is not None and self._now() < ended.until else None

    def _charge(self, books: Books, claim: QuotaClaim, total: Charge, now: int) -> None:
        for name, bucket, window in self._drawn(claim.account, claim.model, now).counted:
            _opened(books, name, bucket, window)
            self._move(books, name, NO_COST, total.counted)
        self._book(books, claim, total, now, LedgerReason.UNRESERVED)

    def _expire_due(self, books: Books, now: int) -> int:
        self._tidy(books, now)
        open_ones = ((known.lease_end, member) for member, known in books.reservations.items() if known.is_open)
        due = sorted(lease for lease in open_ones if lease[0] <= now)
        for _, member in due:
            self._lapse(books, books.reservations[member], LedgerReason.EXPIRED)
        return len(due)

    def _lapse(self, books: Books, known: Reservation, reason: LedgerReason) -> None:
        total = Charge.of(known.progress, known.claim.prices)
        self._close(books, known, total, reason)
        known.end(total)

    def _close(self, books: Books, known: Reservation, total: Charge, reason: LedgerReason) -> None:
        charge = total.above(known.charged)
        for name, _, _ in known.drawn.counted:
            self._move(books, name, known.cost, charge.counted)
        if known.is_open:
            for name, _ in known.drawn.flows:
                flow = books.flows.get(name, FlowCounters())
                books.flows[name] = FlowCounters(max(0, flow.running - 1), flow.arrival)
        if charge != NO_CHARGE:
            self._book(books, known.claim, charge, known.debited_at, reason)

    def _move(self, books: Books, name: str, held: Cost, used: Cost) -> None:
        window = books.windows.get(name)
        if window is None:
            return
        window.counters = window.counters.moved(held, used)
        limit, counted = window.bucket.alert_limit(window.window.kind), window.counters.used
        if limit is not None and (percent := alert_percent(limit, counted.tokens)) > window.warned:
            self._warn(books, window, percent, limit)

    def _warn(self, books: Books, window: CountedWindow, percent: int, limit: int) -> None:
        window.warned = percent
        books.warnings += 1
        scope, used = window.bucket.scope, window.counters.used
        alert = QuotaAlert(
            scope.level,
            scope.subject,
            scope.model,
            METRICS[window.window.kind][0],
            window.window.start,
            percent,
            limit,
            used.tokens,
            id=f"{self._now() // 1000:013d}-{books.warnings:09d}",
        )
        books.alerts.append(alert)

    def _warn_exhausted(self, books: Books, drawn: Drawn, cost: Cost) -> None:
        """A refusal tells that a day or month is used up, whatever is only reserved of it."""
        for name, bucket, at in drawn.counted:
            window, limit, metric = books.windows.get(name), bucket.alert_limit(at.kind), METRICS[at.kind][0]
            if window is None or limit is None or metric in bucket.limits.shadow or window.warned == 100:
                continue
            counted = window.counters.total.plus(cost)
            if cost.tokens > 0 and counted.tokens > limit:
                self._warn(books, window, 100, limit)

    def _book(self, books: Books, claim: QuotaClaim, charge: Charge, debited_at: int, reason: LedgerReason) -> None:
        books.entries += 1
        entry = LedgerEntry(
            id=f"{self._now() // 1000:013d}-{books.entries:09d}",
            debited_at=debited_at,
            reason=reason,
            request_id=claim.request_id,
            tenant=claim.account.tenant.name,
            key_id=claim.account.key.id,
            model=claim.model,
            requests=charge.requests,
            input_tokens=charge.input,
            cached_tokens=charge.cached,
            output_tokens=charge.output,
            cost=charge.cost,
            energy_millijoules=charge.energy,
        )
        books.ledger.append(entry)
        if self._kept_entries is not None:
            del books.ledger[: -self._kept_entries], books.alerts[: -self._kept_entries]

    def _tidy(self, books: Books, now: int) -> None:
        """Forget what Redis lets expire, once a minute."""
        if now - books.tidied < MINUTE:
            return
        books.tidied = now
        books.windows = {n: w for n, w in books.windows.items() if now < w.window.end + WINDOW_KEPT}
        books.flows = {n: f for n, f in books.flows.items() if f.running > 0 or f.arrival > now}
        books.ended = {k: e for k, e in books.ended.items() if now < e.until}
        books.succeeded = {k: s for k, s in books.succeeded.items() if now < s[1]}
        books.reservations = {
            m: r for m, r in books.reservations.items() if r.is_open or now < r.lease_end + EXPIRED_KEPT
        }

    def _of(self, claim: QuotaClaim) -> Books:
        return self._books.setdefault(claim.account.organisation.name, Books())

    def _drawn(self, account: Account, model: str, now: int) -> Drawn:
        organisation = account.organisation.name
        windows = self._calendar.windows(account.organisation.time_zone, account.tenant.time_zone, now)
        claimed = Drawn(buckets_of(account, model), windows)
        counted = _counters(self._books.setdefault(organisation, Books()), claimed)
        return Drawn(self._terms(organisation, claimed.buckets, windows, counted), windows)

    def _now(self) -> int:
        return round(self._clock.wall() * MICROSECONDS)


def _size(claim: QuotaClaim) -> tuple[int, int]:
    return claim.input_tokens, claim.output_tokens


def _opened(books: Books, name: str, bucket: Bucket, window: Window) -> CountedWindow:
    opened = books.windows.setdefault(name, CountedWindow(bucket, window))
    opened.bucket = bucket
    return opened


def _standing(books: Books, drawn: Drawn, now: int) -> tuple[QuotaBalance, ...]:
    return balances(drawn.buckets, drawn.windows, _counters(books, drawn), now)


def _counters(books: Books, drawn: Drawn) -> list[Counters]:
    found: list[Counters] = []
    for bucket in drawn.buckets:
        names = (f"{drawn.windows.each[bucket.place(kind)].name}:{bucket.scope.name}" for kind in bucket.kinds)
        windows = (books.windows[name].counters if name in books.windows else WindowCounters() for name in names)
        found.append(Counters(tuple(windows), books.flows.get(bucket.scope.name, FlowCounters())))
    return found
