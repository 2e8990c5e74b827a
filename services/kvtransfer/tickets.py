"""Who may write which blocks, and which of them are valid. Pure: no I/O, no clock.

A block goes through: expected, writing, acknowledged, confirmed (valid). Whatever does not fit is refused by name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.core.errors import TransferRejected
from baton.core.types import Attempt, Ticket

MAX_REMEMBERED = 16384  # hops whose retries are known: far more than end while a late offer is on its way


@dataclass(slots=True)
class _Entry:
    ticket: Ticket
    blocks: range
    writing: set[int] = field(default_factory=set[int])
    acknowledged: set[int] = field(default_factory=set[int])
    confirmed: set[int] = field(default_factory=set[int])


class TicketBook:
    """The open tickets of one receiver, one for each (request, attempt)."""

    def __init__(self, address: str, epoch: int) -> None:
        self._address = address
        self._epoch = epoch
        self._open: dict[tuple[str, Attempt], _Entry] = {}
        self._last: OrderedDict[tuple[str, int], int] = OrderedDict()  # retry that had a ticket, by request and hop

    def __len__(self) -> int:
        return len(self._open)

    def fresh(self, request_id: str, attempt: Attempt) -> Attempt:
        """``attempt``, or the next retry of its hop that never had a ticket.

        Clients choose request ids, so two tenants may have the same one at a time, and a client one after another. What
        comes late for the former request has to meet a dead ticket, not the same one again.
        """
        used = self._last.get((request_id, attempt.hop))
        return attempt if used is None else Attempt(attempt.hop, max(attempt.retry, used + 1))

    def open(self, request_id: str, attempt: Attempt, blocks: range) -> Ticket:
        """Allow ``blocks`` (ordinals in the sequence) to be filled. TransferRejected while this attempt is open."""
        if (request_id, attempt) in self._open:
            raise TransferRejected(f"request {request_id}: attempt {attempt} already has a ticket")
        ticket = Ticket(request_id, attempt, self._address, self._epoch)
        self._open[request_id, attempt] = _Entry(ticket, blocks)
        self._remember(request_id, attempt)
        return ticket

    def close(self, ticket: Ticket) -> None:
        """From now on everything under this ticket is refused."""
        self._open.pop((ticket.request_id, ticket.attempt), None)

    def blocks(self, ticket: Ticket) -> range:
        """Those that the ticket allows to be filled."""
        return self._entry(ticket).blocks

    @contextmanager
    def writing(self, ticket: Ticket, first_block: int, block_count: int) -> Iterator[None]:
        """Around one write: admitted before it, acknowledged after it, and only if the ticket is still open then."""
        entry = self._entry(ticket)
        blocks = _range(entry, first_block, block_count)
        _refuse(entry.confirmed.intersection(blocks), "already confirmed", ticket)
        _refuse(entry.writing.intersection(blocks), "being written by another offer", ticket)
        entry.acknowledged.difference_update(blocks)  # what is written once more is not what was acknowledged
        entry.writing.update(blocks)
        try:
            yield
        finally:
            entry.writing.difference_update(blocks)
        if self._open.get((ticket.request_id, ticket.attempt)) is not entry:
            raise TransferRejected(f"request {ticket.request_id}: the ticket was closed during the write")
        entry.acknowledged.update(blocks)

    def has_acknowledged(self, ticket: Ticket, first_block: int, block_count: int) -> bool:
        """All of these blocks; TransferRejected for others than the ticket's, and when it is not open."""
        entry = self._entry(ticket)
        return entry.acknowledged.issuperset(_range(entry, first_block, block_count))

    def confirm(self, ticket: Ticket, first_block: int, block_count: int) -> None:
        """The blocks are valid from now on."""
        entry = self._entry(ticket)
        blocks = _range(entry, first_block, block_count)
        _refuse(entry.confirmed.intersection(blocks), "already confirmed", ticket)
        _refuse(set(blocks) - entry.acknowledged, "not acknowledged", ticket)
        entry.confirmed.update(blocks)

    def missing(self, ticket: Ticket) -> tuple[int, ...]:
        """The ticket's blocks that are not valid yet."""
        entry = self._entry(ticket)
        return tuple(block for block in entry.blocks if block not in entry.confirmed)

    def _remember(self, request_id: str, attempt: Attempt) -> None:
        hop = (request_id, attempt.hop)
        self._last[hop] = max(attempt.retry, self._last.get(hop, 0))
        self._last.move_to_end(hop)
        if len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)

    def _entry(self, ticket: Ticket) -> _Entry:
        if ticket.receiver_epoch != self._epoch:
            raise TransferRejected(
                f"receiver_epoch: the ticket names {ticket.receiver_epoch}, this receiver is {self._epoch}"
            )
        if ticket.receiver_address != self._address:
            raise TransferRejected(
                f"receiver_address: the ticket names {ticket.receiver_address!r}, this receiver is {self._address!r}"
            )
        entry = self._open.get((ticket.request_id, ticket.attempt))
        if entry is not None:
            return entry
        others = [str(attempt) for request_id, attempt in self._open if request_id == ticket.request_id]
        if others:
            raise TransferRejected(
                f"attempt: {ticket.attempt} of request {ticket.request_id} is closed, open is {', '.join(others)}"
            )
        raise TransferRejected(f"request {ticket.request_id}: no ticket is open")


def _range(entry: _Entry, first_block: int, block_count: int) -> range:
    allowed = entry.blocks
    blocks = range(first_block, first_block + block_count)
    if block_count < 1 or blocks.start < allowed.start or blocks.stop > allowed.stop:
        raise TransferRejected(
            f"blocks {blocks.start}..{blocks.stop - 1} are outside {allowed.start}..{allowed.stop - 1} "
            f"of request {entry.ticket.request_id}"
        )
    return blocks


def _refuse(blocks: set[int], why: str, ticket: Ticket) -> None:
    if blocks:
        raise TransferRejected(f"block {min(blocks)} of request {ticket.request_id}: {why}")
