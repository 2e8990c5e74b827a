from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InvalidRequest
from baton.core.types import Attempt, KvChunk, KvConfirmation, KvSource, Ticket
from baton.rpc.packed import confirmation_of, offer_of, packed_confirmation, packed_offer

small = st.integers(0, 2**32 - 1)
large = st.integers(0, 2**64 - 1)
checksums = st.lists(st.binary(min_size=16, max_size=16), max_size=40).map(tuple)
tickets = st.builds(Ticket, st.text(max_size=40), st.builds(Attempt, small, small), st.text(max_size=40), large)
sources = st.builds(
    KvSource,
    large,
    st.lists(small, max_size=40).map(tuple),
    st.text(max_size=12),
    large,
    large,
    st.binary(max_size=150),
)
offers = st.builds(
    KvChunk, tickets, small, small, st.just(b""), checksums, sources, late_checksums=st.binary(max_size=40)
)
confirmations = st.builds(KvConfirmation, tickets, small, small, checksums)


def packed(message: KvChunk | KvConfirmation) -> bytes:
    found = packed_offer(message) if isinstance(message, KvChunk) else packed_confirmation(message)
    assert found is not None
    return found


@given(offers)
def test_an_offer_is_read_as_it_was_written(chunk: KvChunk) -> None:
    assert offer_of(packed(chunk)) == chunk


@given(confirmations)
def test_a_confirmation_is_read_as_it_was_written(confirmation: KvConfirmation) -> None:
    assert confirmation_of(packed(confirmation)) == confirmation


TICKET = Ticket("r", Attempt(0, 0), "d:1", 2)
OFFER = KvChunk(TICKET, 0, 2, b"", source=KvSource(7, (1, 2)))
CONFIRMATION = KvConfirmation(TICKET, 0, 2)
UNSAYABLE_TICKETS = [
    replace(TICKET, request_id="half a character: \ud800"),
    replace(TICKET, receiver_address="\udfff"),
    replace(TICKET, attempt=Attempt(-1, 0)),
    replace(TICKET, attempt=Attempt(0, 2**32)),
    replace(TICKET, receiver_epoch=2**64),
]


@pytest.mark.parametrize("ticket", UNSAYABLE_TICKETS)
def test_a_ticket_that_no_packet_can_say_is_packed_in_none(ticket: Ticket) -> None:
    assert packed_offer(replace(OFFER, ticket=ticket)) is None
    assert packed_confirmation(replace(CONFIRMATION, ticket=ticket)) is None


@pytest.mark.parametrize(
    "source",
    [
        KvSource(7, (1, -1)),
        KvSource(7, (1, 2**32)),
        KvSource(2**64, (1, 2)),
        KvSource(7, (1, 2), link=-1),
        KvSource(7, (1, 2), "\ud800"),
    ],
)
def test_a_source_that_no_packet_can_say_is_packed_in_none(source: KvSource) -> None:
    assert packed_offer(replace(OFFER, source=source)) is None


@pytest.mark.parametrize("count", [-1, 2**32])
def test_a_number_of_blocks_that_no_packet_can_say_is_packed_in_none(count: int) -> None:
    assert packed_offer(replace(OFFER, block_count=count)) is None
    assert packed_confirmation(replace(CONFIRMATION, block_count=count)) is None


@given(offers, st.data())
def test_an_offer_that_is_cut_off_or_goes_on_is_refused(chunk: KvChunk, data: st.DataObject) -> None:
    whole = packed(chunk)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for damaged in (cut, whole + b"\0"):
        with pytest.raises(InvalidRequest, match=f"packet: {len(damaged)} bytes are no offer"):
            offer_of(damaged)


@given(confirmations, st.data())
def test_a_confirmation_that_is_cut_off_or_goes_on_is_refused(
    confirmation: KvConfirmation, data: st.DataObject
) -> None:
    whole = packed(confirmation)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for damaged in (cut, whole + b"\0"):
        with pytest.raises(InvalidRequest, match=f"packet: {len(damaged)} bytes are no confirmation"):
            confirmation_of(damaged)


@given(st.binary(max_size=300))
def test_whatever_comes_is_read_or_refused(data: bytes) -> None:
    for read in (offer_of, confirmation_of):
        with suppress(InvalidRequest):
            read(data)


@given(offers, st.data())
def test_a_damaged_offer_is_read_or_refused(chunk: KvChunk, data: st.DataObject) -> None:
    whole = bytearray(packed(chunk))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(InvalidRequest):
        offer_of(bytes(whole))
