from __future__ import annotations

from contextlib import suppress

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
