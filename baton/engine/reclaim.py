"""Whose blocks go back to the tier they are reserved for. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from baton.engine.blocks import BlockPool
from baton.engine.sequence import Sequence
from baton.engine.shares import FairShares
from baton.engine.victims import giving_order


def borrowers(
    claimant: Sequence,
    running: Ordered[Sequence],
    shares: FairShares,
    pool: BlockPool,
    *,
    has_claim: bool,
    places: int,
    blocks: int,
) -> list[Sequence]:
    """Sequences that are to be preempted for a claimant that lacks so many ``places`` and ``blocks``.

    As many as are needed, in the order in which tiers, from the lowest up, and their tenants give (``victims.py``): of
    tiers below the claimant's that have more than is reserved for them and, unless the claimant's has less than is
    reserved for it, were charged no less than it by weight. Empty when nothing is lacking, or when all of them together
    were not enough. Whoever was admitted for having waited too long stays.
    """
    if places <= 0 and blocks <= 0:
        return []
    own = claimant.share.tier
    lower = [tier for tier in shares.borrowing_below(own) if has_claim or tier.due >= own.due]
    victims: list[Sequence] = []
    for tier in reversed(lower):
        given_blocks = 0
        giving = giving_order(s for s in running if s.share.tier is tier and _may_go(s))
        for given_places, sequence in enumerate(giving):
            if not shares.is_borrowing(tier, given_places, given_blocks):
                break
            freed = pool.exclusive(sequence.blocks)
            given_blocks += freed
            victims.append(sequence)
            places -= 1
            blocks -= freed
            if places <= 0 and blocks <= 0:
                return victims
    return []


def _may_go(sequence: Sequence) -> bool:
    return sequence.is_preemptible and not sequence.was_rescued
