"""Who is next: the bounded queue before admission. Pure; told the time, it never asks.

Inside a tenant the order is by priority, then arrival. Of a tier's tenants the one that was charged least is next, of
the tiers, weighted, likewise; but first come tiers that have less than is reserved for them, from the highest down, and
before all the oldest request of a tenant that has waited past its tier's bound (one a tenant and bound: a tenant's own
flood is no starvation). Passed over are tenants that hold all the blocks they may, and tiers whose next request would
take, beyond their own reserved share, what others could not get back.

Whoever is next stays next until something changes, so a large request is not overtaken by small ones that happen to
fit. Only a reserved share may be used past one that waits beyond its bound and does not fit yet, for as long again.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator
from itertools import chain

from baton.engine.sequence import Sequence
from baton.engine.share import TenantShare, TierShare
from baton.engine.shares import FairShares


def rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


class WaitingQueue:
    """``blocks_wanted(sequence)``: what its admission takes; ``new_blocks(sequence)``: those of them that its tenant
    does not hold yet; ``fits(sequence)``: whether it could be admitted now; ``settle()`` charges those who run."""

    def __init__(
        self,
        shares: FairShares,
        blocks_wanted: Callable[[Sequence], int],
        new_blocks: Callable[[Sequence], int],
        fits: Callable[[Sequence], bool],
        settle: Callable[[], None],
    ) -> None:
        self._shares = shares
        self._blocks_wanted = blocks_wanted
        self._new_blocks = new_blocks
        self._fits = fits
        self._settle = settle
        self._queues: dict[TenantShare, list[Sequence]] = {}
        self._count = 0
        self._next: Sequence | None = None
        self._next_is_rescue = False
        self._is_stale = False
        self.due_at = math.inf  # when somebody will have waited past its bound

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._queues.values())

    def add(self, sequence: Sequence, now: float) -> None:
        """Once more when the sequence has been preempted. Unless it got a token meanwhile it has waited all along: a
        place that is given and taken away again is no end of waiting."""
        share = sequence.share
        if not share.is_backlogged:
            self._settle()
            self._shares.lift(share)
        insort(self._queues.setdefault(share, []), sequence, key=rank)
        share.waiting += 1
        share.tier.waiting += 1
        self._count += 1
        if sequence.output_tokens > sequence.output_when_queued:
            sequence.output_when_queued = sequence.output_tokens
            sequence.waiting_since = now
        self.changed()

    def remove(self, sequence: Sequence) -> None:
        share = sequence.share
        queue = self._queues[share]
        queue.remove(sequence)
        if not queue:
            del self._queues[share]
        share.waiting -= 1
        share.tier.waiting -= 1
        self._count -= 1
        self.changed()

    def changed(self) -> None:
        """Something was given back or taken: who is next has to be decided anew."""
        self._is_stale = True

    def next(self, now: float) -> Sequence | None:
        """Who is to be admitted before anybody else; None: nobody may be, whatever is free."""
        if self._is_stale or now >= self.due_at:
            self._is_stale = False
            self._next, self._next_is_rescue = self._choose(now)
        return self._next

    def take(self, sequence: Sequence, now: float) -> None:
        """``next`` is admitted."""
        self.remove(sequence)
        if self._next_is_rescue:
            sequence.share.rescued_at = now
            sequence.was_rescued = True

    def reason(self, sequence: Sequence) -> str:
        """Why a waiting sequence is not next, if it is for its tenant's own limit; else nothing."""
        if self._is_capped(sequence):
            return sequence.share.cap_reason
        return ""

    def gives_way(self, newcomer: Sequence) -> Sequence | None:
        """Whose place in a full queue a newcomer takes: of the lowest tier that has more places than its share, the
        last of the tenant with most; None: nobody's.

        Whoever was admitted once does not give way. A tier gives way to higher ones, to any that has less than its
        share, and among its own tenants to those with fewer.
        """
        own = newcomer.share
        for tier in reversed(self._shares.tiers):
            queue = max((q for s, q in self._queues.items() if s.tier is tier), key=len, default=[])
            fresh = next((s for s in reversed(queue) if not s.preemptions), None)
            if fresh is None:
                continue
            if tier is own.tier:
                if len(queue) > own.waiting + 1:
                    return fresh
            elif self._exceeds(tier, 0) and (tier.place > own.tier.place or not self._exceeds(own.tier, 1)):
                return fresh
        return None

    def _exceeds(self, tier: TierShare, more: int) -> bool:
        """With so many more waiting the tier has more places of the queue than its share."""
        return tier.waiting + more > tier.policy.reserved_share * self._count

    # --- the choice ---------------------------------------------------------------------------------------------------

    def _choose(self, now: float) -> tuple[Sequence | None, bool]:
        """Who is next, and whether it is for having waited too long."""
        if len(self._queues) > 1:
            self._settle()
        rescue, since = self._overdue(now)
        if rescue is not None and (self._fits(rescue) or now - since >= rescue.share.tier.policy.bound_seconds):
            return rescue, True
        heads = [head for tier in self._shares.tiers if (head := self._head_of(tier)) is not None]
        for head in heads:
            if self._shares.has_claim(head.share.tier, self._blocks_wanted(head)):
                return head, False
        if rescue is not None:
            return rescue, True
        considerate = [head for head in heads if self._leaves_room(head, now)]
        return min(considerate, key=lambda head: head.share.tier.due, default=None), False

    def _leaves_room(self, head: Sequence, now: float) -> bool:
        is_fixed = head.is_prefill or not head.preemptions
        return self._shares.leaves_room(head.share.tier, self._blocks_wanted(head), now, is_fixed=is_fixed)

    def _head_of(self, tier: TierShare) -> Sequence | None:
        heads = (queue[0] for share, queue in self._queues.items() if share.tier is tier)
        able = (head for head in heads if not self._is_capped(head))
        return min(able, key=lambda head: (head.share.due, head.arrival), default=None)

    def _overdue(self, now: float) -> tuple[Sequence | None, float]:
        """The request that is longest past its bound, and since when; notes when the next one will be."""
        found, since, self.due_at = None, math.inf, math.inf
        for share, queue in self._queues.items():
            oldest = min(queue, key=_arrival)
            due_at = max(oldest.waiting_since, share.rescued_at) + share.tier.policy.bound_seconds
            if due_at > now:
                self.due_at = min(self.due_at, due_at)
            elif due_at < since and not self._is_capped(oldest):
                found, since = oldest, due_at
        return found, since

    def _is_capped(self, sequence: Sequence) -> bool:
        share = sequence.share
        if not share.is_capped(self._blocks_wanted(sequence)):
            return False
        return share.is_capped(self._new_blocks(sequence))
