"""An offer whose payload stays beside the message is the same on the wire as one made by protobuf."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from baton.rpc.wire.offer import Offer
from protos.baton.v1 import kvtransfer_pb2 as pb

RESTS = st.builds(
    pb.OfferRequest,
    first_block=st.integers(0, 2**32 - 1),
    block_count=st.integers(0, 2**32 - 1),
    checksums=st.lists(st.binary(max_size=20), max_size=3),
    source=st.none() | st.builds(pb.KvSource, epoch=st.integers(0, 2**64 - 1), blocks=st.lists(st.integers(0, 300))),
)
PIECES = st.lists(st.binary(max_size=300), max_size=3).map(tuple)
UNKNOWN = bytes([15 << 3 | 5]) + bytes(4) + bytes([14 << 3 | 1]) + bytes(8) + bytes([13 << 3, 0x80, 1])


def whole(rest: pb.OfferRequest, payload: bytes) -> pb.OfferRequest:
    message = pb.OfferRequest()
    message.CopyFrom(rest)
    message.payload = payload
    return message


@given(rest=RESTS, pieces=PIECES)
def test_protobuf_reads_what_is_sent(rest: pb.OfferRequest, pieces: tuple[bytes, ...]) -> None:
    sent = Offer(rest, tuple(map(memoryview, pieces))).SerializeToString()
    assert pb.OfferRequest.FromString(sent) == whole(rest, b"".join(pieces))


@given(rest=RESTS, payload=st.binary(max_size=300))
def test_what_protobuf_sent_is_read(rest: pb.OfferRequest, payload: bytes) -> None:
    offer = Offer.FromString(whole(rest, payload).SerializeToString())
    assert offer.rest == rest
    assert b"".join(offer.pieces) == payload


def test_a_payload_is_not_copied() -> None:
    sent = Offer(pb.OfferRequest(block_count=1), (bytes(1000),)).SerializeToString()
    (piece,) = Offer.FromString(sent).pieces
    assert isinstance(piece, memoryview)
    assert piece.obj is sent


def test_fields_of_a_later_version_are_passed_over() -> None:
    offer = Offer.FromString(UNKNOWN + whole(pb.OfferRequest(block_count=7), b"kv").SerializeToString())
    assert (offer.rest.block_count, b"".join(offer.pieces)) == (7, b"kv")


def test_of_two_payloads_the_last_one_counts() -> None:
    twice = (
        pb.OfferRequest(payload=b"first", block_count=3).SerializeToString()
        + pb.OfferRequest(payload=b"last").SerializeToString()
    )
    offer = Offer.FromString(twice)
    assert (offer.rest, offer.pieces) == (pb.OfferRequest(block_count=3), (b"last",))


@example(data=b"s\x08\x00t")  # an unknown group
@given(data=st.binary(max_size=40))
def test_it_refuses_what_protobuf_refuses(data: bytes) -> None:
    try:
        expected = pb.OfferRequest.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            Offer.FromString(data)
        return
    offer = Offer.FromString(data)
    assert whole(offer.rest, b"".join(offer.pieces)) == expected


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_message_that_was_cut_off_is_refused(cut: int) -> None:
    sent = Offer(pb.OfferRequest(), (bytes(20),)).SerializeToString()
    with pytest.raises(DecodeError):
        Offer.FromString(sent[:-cut])
