"""In which order the sequences of a tier give up their blocks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from baton.engine.sequence import Sequence
from baton.engine.share import TenantShare


def giving_order(running: Iterable[Sequence]) -> Iterator[Sequence]:
    """``running`` are sequences of one tier in order of rank, all of which may be preempted.

    Next is always the last one of the tenant that would hold the most blocks without it, whether running or reserved;
    of equal ones the youngest. So who holds much gives first, a tenant's only request goes after all further ones of
    others, and a priority moves nobody past another tenant.
    """
    queues: dict[TenantShare, list[Sequence]] = {}
    for sequence in running:
        queues.setdefault(sequence.share, []).append(sequence)
    left = {share: len(share.blocks) for share in queues}
    while queues:
        lasts = ((left[share] - share.own(q[-1].blocks), q[-1].arrival, share) for share, q in queues.items())
        left_over, _, share = max(lasts, key=lambda last: last[:2])
        left[share] = left_over
        yield queues[share].pop()
        if not queues[share]:
            del queues[share]
