"""Offers of mapped blocks, and confirmations, as the packets between two workers of one host write them.

A hand-over is over in a millisecond or two, of which protobuf took a quarter: what is called now and then finds neither
its code nor its data in the caches, so what counts is how little there is of both. A message is a head of fixed size,
then the texts and arrays whose lengths the head gives, in its order.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

from baton.core.errors import InvalidRequest
from baton.core.types import Attempt, KvChunk, KvConfirmation, KvSource, Ticket

CHECKSUM_BYTES = 16
_UINT32 = "I"  # in this machine's byte order, which both ends have
_UNSAYABLE = (struct.error, OverflowError, UnicodeEncodeError)  # a number out of range, or half a character

# Hop, retry, receiver's epoch; first block, how many; lengths of request id, receiver's address and checksums.
_CONFIRMATION = struct.Struct("<IIQIIIII")
# Behind these: the source's epoch, link and number; lengths of transport, invitation, late checksums, block numbers.
_OFFER = struct.Struct("<IIQIIIIIQQQIIII")


def packed_offer(chunk: KvChunk) -> bytes | None:
    """None for a chunk that has bytes of its own, blocks of another layout, or what no packet can say: such ones take
    the usual way, which refuses by name what it cannot say either."""
    source, checksums = chunk.source, _joined(chunk.checksums)
    if source is None or chunk.payload or chunk.pieces or chunk.format is not None or checksums is None:
        return None
    try:
        return _offer(chunk, source, checksums)
    except _UNSAYABLE:
        return None


def _offer(chunk: KvChunk, source: KvSource, checksums: bytes) -> bytes:
    ticket = chunk.ticket
    attempt, request_id, address = ticket.attempt, ticket.request_id.encode(), ticket.receiver_address.encode()
    transport, invitation, late = source.transport.encode(), source.invitation, chunk.late_checksums
    ids = array(_UINT32, source.blocks).tobytes()
    head = _OFFER.pack(
        attempt.hop,
        attempt.retry,
        ticket.receiver_epoch,
        chunk.first_block,
        chunk.block_count,
        len(request_id),
        len(address),
        len(checksums),
        source.epoch,
        source.link,
        source.number,
        len(transport),
        len(invitation),
        len(late),
        len(ids),
    )
    return b"".join((head, request_id, address, checksums, transport, invitation, late, ids))


def offer_of(packed: bytes) -> KvChunk:
    """InvalidRequest when it is none."""
    try:
        head = _OFFER.unpack_from(packed)
        hop, retry, receiver, first, count, id_size, address_size, checksum_size = head[:8]
        epoch, link, number, transport_size, invitation_size, late_size, ids_size = head[8:]
        address_at = _OFFER.size + id_size
        checksums_at = address_at + address_size
        transport_at = checksums_at + checksum_size
        invitation_at = transport_at + transport_size
        late_at = invitation_at + invitation_size
        ids_at = late_at + late_size
        _require_end(packed, ids_at + ids_size)
        blocks = tuple(array(_UINT32, packed[ids_at:]))
        request_id, address = packed[_OFFER.size : address_at].decode(), packed[address_at:checksums_at].decode()
        transport, invitation = packed[transport_at:invitation_at].decode(), packed[invitation_at:late_at]
        checksums = _checksums(packed[checksums_at:transport_at])
    except (struct.error, ValueError) as error:
        raise InvalidRequest(f"packet: {len(packed)} bytes are no offer: {error}") from error
    ticket = Ticket(request_id, Attempt(hop, retry), address, receiver)
    source = KvSource(epoch, blocks, transport, link, number, invitation)
    return KvChunk(ticket, first, count, b"", checksums, source, late_checksums=packed[late_at:ids_at])


def packed_confirmation(confirmation: KvConfirmation) -> bytes | None:
    """None where some blocks have checksums and others have none, and for what no packet can say, as an offer's."""
    checksums = _joined(confirmation.checksums)
    try:
        return None if checksums is None else _confirmation(confirmation, checksums)
    except _UNSAYABLE:
        return None


def _confirmation(confirmation: KvConfirmation, checksums: bytes) -> bytes:
    ticket = confirmation.ticket
    attempt, request_id, address = ticket.attempt, ticket.request_id.encode(), ticket.receiver_address.encode()
    head = _CONFIRMATION.pack(
        attempt.hop,
        attempt.retry,
        ticket.receiver_epoch,
        confirmation.first_block,
        confirmation.block_count,
        len(request_id),
        len(address),
        len(checksums),
    )
    return b"".join((head, request_id, address, checksums))


def confirmation_of(packed: bytes) -> KvConfirmation:
    """InvalidRequest when it is none."""
    try:
        head = _CONFIRMATION.unpack_from(packed)
        hop, retry, receiver, first, count, id_size, address_size, checksum_size = head
        address_at = _CONFIRMATION.size + id_size
        checksums_at = address_at + address_size
        _require_end(packed, checksums_at + checksum_size)
        request_id, address = packed[_CONFIRMATION.size : address_at].decode(), packed[address_at:checksums_at].decode()
        checksums = _checksums(packed[checksums_at:])
    except (struct.error, ValueError) as error:
        raise InvalidRequest(f"packet: {len(packed)} bytes are no confirmation: {error}") from error
    return KvConfirmation(Ticket(request_id, Attempt(hop, retry), address, receiver), first, count, checksums)


def _require_end(packed: bytes, end: int) -> None:
    if end != len(packed):
        raise ValueError(f"{end} bytes were announced")


def _joined(checksums: Sequence[bytes]) -> bytes | None:
    """None where one is of another length."""
    joined = b"".join(checksums)
    return joined if len(joined) == CHECKSUM_BYTES * len(checksums) and all(map(_is_whole, checksums)) else None


def _is_whole(checksum: bytes) -> bool:
    return len(checksum) == CHECKSUM_BYTES


def _checksums(joined: bytes) -> tuple[bytes, ...]:
    if len(joined) % CHECKSUM_BYTES:
        raise ValueError(f"checksums of {CHECKSUM_BYTES} bytes each were announced, in all {len(joined)}")
    return tuple([joined[at : at + CHECKSUM_BYTES] for at in range(0, len(joined), CHECKSUM_BYTES)])
