"""Whose blocks go back to the tier they are reserved for. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from baton.engine.blocks import BlockPool
from baton.engine.sequence import Sequence
from baton.engine.share import TierShare
from baton.engine.shares import FairShares


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

    The last ones of ``running``, which is in order of rank, as many as are needed: of tiers below the claimant's that
    have more than is reserved for them and, unless the claimant's has less than is reserved for it, were charged no
    less than it by weight. Empty when nothing is lacking, or when all of them together were not enough. Whoever was
    admitted for having waited too long stays.
    """
    if places <= 0 and blocks <= 0:
        return []
    own = claimant.share.tier
    lower = {tier for tier in shares.borrowing_below(own) if has_claim or tier.due >= own.due}
    victims: list[Sequence] = []
    given_places: Counter[TierShare] = Counter()
    given_blocks: Counter[TierShare] = Counter()
    for sequence in _preemptible(running):
        tier = sequence.share.tier
        if tier not in lower or not shares.is_borrowing(tier, given_places[tier], given_blocks[tier]):
            continue
        freed = pool.exclusive(sequence.blocks)
        given_places[tier] += 1
        given_blocks[tier] += freed
        victims.append(sequence)
        places -= 1
        blocks -= freed
        if places <= 0 and blocks <= 0:
            return victims
    return []


def _preemptible(running: Ordered[Sequence]) -> Iterable[Sequence]:
    return (sequence for sequence in reversed(running) if sequence.is_preemptible and not sequence.was_rescued)
