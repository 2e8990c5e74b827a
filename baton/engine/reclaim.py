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
    claimant: Sequence, running: Ordered[Sequence], shares: FairShares, pool: BlockPool, *, places: int, blocks: int
) -> list[Sequence]:
    """Sequences that are to be preempted for a claimant that lacks so many ``places`` and ``blocks``.

    The last ones of ``running``, which is in order of rank, as many as are needed: of tiers below the claimant's that
    have more than is reserved for them. Empty when nothing is lacking, or when all of them together were not enough.
    Whoever was admitted for having waited too long stays.
    """
    if places <= 0 and blocks <= 0:
        return []
    victims: list[Sequence] = []
    given_places: Counter[TierShare] = Counter()
    given_blocks: Counter[TierShare] = Counter()
    for sequence in _lower(claimant, running):
        tier = sequence.share.tier
        if not shares.is_borrowing(tier, given_places[tier], given_blocks[tier]):
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


def _lower(claimant: Sequence, running: Ordered[Sequence]) -> Iterable[Sequence]:
    place = claimant.share.tier.place
    return (s for s in reversed(running) if s.share.tier.place > place and s.is_preemptible and not s.was_rescued)
