"""The ticket book: who may write which blocks, and when a block is valid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.errors import TransferRejected
from baton.core.types import Attempt, Ticket
from services.kvtransfer import tickets
from services.kvtransfer.tickets import TicketBook

EPOCH = 7
ATTEMPT = Attempt(0, 1)


@pytest.fixture
def book() -> TicketBook:
    return TicketBook("decode:1", EPOCH)


def write(book: TicketBook, ticket: Ticket, first: int, count: int) -> None:
    with book.writing(ticket, first, count):
        pass


def test_block_is_valid_only_after_write_and_confirmation(book: TicketBook) -> None:
    ticket = book.open("r", ATTEMPT, range(2, 5))
    assert ticket == Ticket("r", ATTEMPT, "decode:1", EPOCH)
    assert book.missing(ticket) == (2, 3, 4)
    write(book, ticket, 2, 2)
    assert book.missing(ticket) == (2, 3, 4)
    book.confirm(ticket, 2, 2)
    assert book.missing(ticket) == (4,)
    write(book, ticket, 4, 1)
    book.confirm(ticket, 4, 1)
    assert book.missing(ticket) == ()


def test_confirmation_of_an_unwritten_block_is_refused(book: TicketBook) -> None:
    ticket = book.open("r", ATTEMPT, range(2))
    write(book, ticket, 0, 1)
    with pytest.raises(TransferRejected, match="block 1 of request r: not acknowledged"):
        book.confirm(ticket, 0, 2)
    assert book.missing(ticket) == (0, 1)


def test_failed_write_acknowledges_nothing(book: TicketBook) -> None:
    ticket = book.open("r", ATTEMPT, range(1))
    with pytest.raises(OSError), book.writing(ticket, 0, 1):
        raise OSError
    with pytest.raises(TransferRejected, match="not acknowledged"):
        book.confirm(ticket, 0, 1)
    write(book, ticket, 0, 1)  # and it may be offered again
    book.confirm(ticket, 0, 1)
    assert book.missing(ticket) == ()


def test_write_that_outlives_its_ticket_is_refused(book: TicketBook) -> None:
    ticket = book.open("r", ATTEMPT, range(1))
    with pytest.raises(TransferRejected), book.writing(ticket, 0, 1):
        book.close(ticket)


def test_write_that_outlives_its_ticket_does_not_count_for_the_same_ticket_opened_again(book: TicketBook) -> None:
    ticket = book.open("r", ATTEMPT, range(1))
    with pytest.raises(TransferRejected, match="closed during the write"), book.writing(ticket, 0, 1):
        book.close(ticket)
        assert book.open("r", ATTEMPT, range(1)) == ticket
    with pytest.raises(TransferRejected, match="not acknowledged"):
        book.confirm(ticket, 0, 1)


@pytest.mark.parametrize(("first", "count"), [(1, 1), (4, 2), (5, 1), (2, 0), (0, 9)])
def test_blocks_outside_the_ticket_are_refused(book: TicketBook, first: int, count: int) -> None:
    ticket = book.open("r", ATTEMPT, range(2, 5))
    with pytest.raises(TransferRejected, match=r"are outside 2\.\.4 of request r"):
        write(book, ticket, first, count)
    with pytest.raises(TransferRejected, match=r"are outside 2\.\.4 of request r"):
        book.confirm(ticket, first, count)


def test_confirmed_block_cannot_be_written_or_confirmed_again(book: TicketBook) -> None:
    ticket = book.open("r", ATTEMPT, range(3))
    write(book, ticket, 0, 3)
    book.confirm(ticket, 1, 1)
    with pytest.raises(TransferRejected, match="block 1 of request r: already confirmed"):
        write(book, ticket, 0, 2)
    with pytest.raises(TransferRejected, match="block 1 of request r: already confirmed"):
        book.confirm(ticket, 1, 1)


def test_two_writes_into_one_block_at_a_time_are_refused(book: TicketBook) -> None:
    ticket = book.open("r", ATTEMPT, range(3))
    with book.writing(ticket, 0, 2):
        with pytest.raises(TransferRejected, match="block 1 of request r: being written"):
            write(book, ticket, 1, 2)
        write(book, ticket, 2, 1)


def test_ticket_of_another_epoch_is_refused_by_name(book: TicketBook) -> None:
    ticket = book.open("r", ATTEMPT, range(1))
    stale = Ticket("r", ATTEMPT, ticket.receiver_address, EPOCH + 1)
    with pytest.raises(TransferRejected, match="receiver_epoch: the ticket names 8, this receiver is 7"):
        write(book, stale, 0, 1)


def test_ticket_of_another_attempt_is_refused_by_name(book: TicketBook) -> None:
    old = book.open("r", ATTEMPT, range(1))
    book.close(old)
    book.open("r", Attempt(0, 2), range(1))
    with pytest.raises(TransferRejected, match=r"attempt: 0\.1 of request r is closed, open is 0\.2"):
        write(book, old, 0, 1)


def test_unknown_and_closed_tickets_are_refused_by_name(book: TicketBook) -> None:
    ticket = book.open("r", ATTEMPT, range(1))
    book.close(ticket)
    book.close(ticket)
    with pytest.raises(TransferRejected, match="request r: no ticket is open"):
        write(book, ticket, 0, 1)
    assert len(book) == 0


def test_an_attempt_has_one_ticket(book: TicketBook) -> None:
    book.open("r", ATTEMPT, range(1))
    with pytest.raises(TransferRejected, match=r"request r: attempt 0\.1 already has a ticket"):
        book.open("r", ATTEMPT, range(1))


def test_no_attempt_has_a_ticket_twice(book: TicketBook) -> None:
    assert book.fresh("r", ATTEMPT) == ATTEMPT
    book.close(book.open("r", ATTEMPT, range(1)))
    assert book.fresh("r", ATTEMPT) == Attempt(0, 2)
    assert book.fresh("r", Attempt(0, 7)) == Attempt(0, 7)
    assert book.fresh("r", Attempt(1, 1)) == Attempt(1, 1), "hops count by themselves"
    assert book.fresh("other", ATTEMPT) == ATTEMPT
    book.open("r", Attempt(0, 7), range(1))
    book.close(book.open("r", Attempt(0, 2), range(1)))
    assert book.fresh("r", ATTEMPT) == Attempt(0, 8)


def test_a_book_remembers_only_so_many_requests(book: TicketBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "MAX_REMEMBERED", 2)
    for request_id in ("a", "b", "a", "c"):
        book.close(book.open(request_id, book.fresh(request_id, ATTEMPT), range(1)))
    assert [book.fresh(request_id, ATTEMPT).retry for request_id in ("a", "b", "c")] == [3, 1, 2]


def test_ticket_of_another_address_is_refused_by_name(book: TicketBook) -> None:
    """As damaged as any other part of it might be."""
    ticket = replace(book.open("r", ATTEMPT, range(1)), receiver_address="other:1")
    for ask in (lambda: write(book, ticket, 0, 1), lambda: book.confirm(ticket, 0, 1), lambda: book.blocks(ticket)):
        with pytest.raises(TransferRejected, match="receiver_address: the ticket names 'other:1', this receiver is"):
            ask()


def test_a_block_that_is_written_again_is_acknowledged_anew(book: TicketBook) -> None:
    ticket = book.open("r", ATTEMPT, range(2))
    write(book, ticket, 0, 2)
    assert book.has_acknowledged(ticket, 0, 2)
    with pytest.raises(ZeroDivisionError), book.writing(ticket, 1, 1):
        raise ZeroDivisionError
    assert not book.has_acknowledged(ticket, 0, 2)
    with pytest.raises(TransferRejected, match="block 1 of request r: not acknowledged"):
        book.confirm(ticket, 0, 2)
