"""``OfferRequest`` with its payload beside the message: protobuf would copy megabytes twice on either side.

On the wire it is the same message. What is sent begins with the payload's field, whose pieces are put together once,
where gRPC needs them in a row; what arrives is looked through up to that field, which stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from google.protobuf.message import DecodeError

from protos.baton.v1 import kvtransfer_pb2 as pb

Piece = bytes | memoryview

_GROUP = (3, 4)
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # kinds of fields
_LONGEST_VARINT = 10
_PAYLOAD = pb.OfferRequest.PAYLOAD_FIELD_NUMBER << 3 | _BYTES


@dataclass(frozen=True, slots=True)
class Offer:
    """``rest`` has no payload; ``pieces`` joined are it. Has of a message what gRPC and the interceptor use."""

    DESCRIPTOR: ClassVar[Any] = pb.OfferRequest.DESCRIPTOR

    rest: pb.OfferRequest
    pieces: tuple[Piece, ...] = ()

    def SerializeToString(self) -> bytes:
        rest = self.rest.SerializeToString()
        size = sum(len(piece) for piece in self.pieces)
        return b"".join((_varint(_PAYLOAD), _varint(size), *self.pieces, rest)) if size else rest

    @classmethod
    def FromString(cls, data: bytes) -> Offer:
        """Raises DecodeError."""
        view = memoryview(data)
        at = 0
        while at < len(data):
            tag, value = _read_varint(view, at)
            if tag & 7 in _GROUP:  # of a newer version, perhaps: protobuf knows where it ends
                break
            begin, end = _value(view, tag, value)
            if tag == _PAYLOAD:
                rest = pb.OfferRequest.FromString(b"".join((view[:at], view[end:])))
                if rest.payload:  # given once more: the last one counts, as always
                    break
                return cls(rest, (view[begin:end],))
            at = end
        return cls.of(pb.OfferRequest.FromString(data))

    @classmethod
    def of(cls, message: pb.OfferRequest) -> Offer:
        """For small messages. ``message`` loses its payload."""
        payload = message.payload
        message.ClearField("payload")
        return cls(message, (payload,) if payload else ())


def _value(view: memoryview, tag: int, at: int) -> tuple[int, int]:
    """Where the value of a field that stands ``at`` begins and ends."""
    begin = at
    match tag & 7:
        case _ if tag >> 3 == 0:
            raise DecodeError("a field without a number")
        case kind if kind == _VARINT:
            _, end = _read_varint(view, at)
        case kind if kind == _EIGHT_BYTES:
            end = at + 8
        case kind if kind == _FOUR_BYTES:
            end = at + 4
        case kind if kind == _BYTES:
            size, begin = _read_varint(view, at)
            end = begin + size
        case kind:
            raise DecodeError(f"a field of kind {kind}")
    if end > len(view):
        raise DecodeError("a field is cut off")
    return begin, end


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """The number, and where it ends."""
    number = 0
    for index, byte in enumerate(view[at : at + _LONGEST_VARINT]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, at + index + 1
    raise DecodeError("a number without an end")


def _varint(number: int) -> bytes:
    return bytes(_septets(number))


def _septets(number: int) -> Iterable[int]:
    while number >= 0x80:
        yield number & 0x7F | 0x80
        number >>= 7
    yield number
