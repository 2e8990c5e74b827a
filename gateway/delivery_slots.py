"""A delivery log's bytes: a page that says whose it is, then a slot for each reservation in progress. Pure.

    slot    8 words of 64 bits: seal, delivered (input, cached, output, millijoules), claimed (input, output), length
            text: organisation, tenant, request id, owner, one a line

Words are in the machine's own order, so that each is one store: a process that dies between two of them leaves the
older value of one. A slot counts once its seal, the digest of what was claimed and of the text, is there. It is written
last and taken away first, so that of a slot that was being written or freed there is nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import InvalidRequest
from baton.core.tenancy import check_name
from baton.core.types import Delivered, Progress

PAGE = 4096  # the header's, and what files are mapped by
SLOT = 1024  # bytes; a page holds whole slots
SEAL, DELIVERED, CLAIMED, LENGTH, WORDS = 0, 1, 5, 7, 8  # words of a slot
WORD_BYTES = 8
TEXT = WORD_BYTES * WORDS  # where it begins
FREE = 0  # in the place of a seal
MOST = 2**53  # Redis counts in doubles
_MAGIC = b"BATONDL1"
_HEADER = struct.Struct("=8sQQ")  # magic, seal, length of the namespace
_WORDS = struct.Struct(f"={WORDS}Q")


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """Whose deliveries a slot counts, sealed. ``claimed``: input and output tokens, which no count is above."""

    seal: int
    claimed: tuple[int, int]
    text: bytes

    @classmethod
    def of(cls, organisation: str, progress: Progress, claimed: tuple[int, int]) -> SlotIdentity | None:
        """Of what a reservation is told by; None if it is too long for a slot."""
        text = "\n".join((organisation, progress.tenant, progress.request_id, progress.owner)).encode()
        return cls.sealed(claimed, text) if len(text) <= SLOT - TEXT else None

    @classmethod
    def sealed(cls, claimed: tuple[int, int], text: bytes) -> SlotIdentity:
        return cls(_seal(claimed, text), claimed, text)


@dataclass(frozen=True, slots=True)
class LoggedDelivery:
    organisation: str
    progress: Progress


@dataclass(frozen=True, slots=True)
class Slots:
    """What a piece of a log holds. ``damaged``: slots that are neither free nor whole."""

    deliveries: Sequence[LoggedDelivery]
    damaged: int


def header_page(namespace: str) -> bytes:
    """``namespace``: of the counters that its reservations are in, as the setting ``state.namespace`` has it."""
    name = namespace.encode()
    return (_HEADER.pack(_MAGIC, _digest(name), len(name)) + name).ljust(PAGE, b"\0")


def namespace_of(page: bytes) -> str | None:
    """None: this is no delivery log of this version."""
    if len(page) < PAGE:
        return None
    magic, seal, length = _HEADER.unpack_from(page)
    name = page[_HEADER.size : _HEADER.size + length]
    return name.decode(errors="replace") if magic == _MAGIC and seal == _digest(name) else None


def read_slots(data: bytes) -> Slots:
    """Of whole slots, one after the other; a cut one at the end is damaged unless it is empty."""
    whole = len(data) // SLOT * SLOT
    found: list[LoggedDelivery] = []
    damaged = int(any(data[whole:]))
    for at in (at for at in range(0, whole, SLOT) if any(data[at : at + WORD_BYTES])):
        delivery = _read(data, at)
        if delivery is None:
            damaged += 1
        else:
            found.append(delivery)
    return Slots(found, damaged)


def _read(data: bytes, at: int) -> LoggedDelivery | None:
    seal, *counts, most_input, most_output, length = _WORDS.unpack_from(data, at)
    given, cached, output, energy = counts
    text = data[at + TEXT : at + TEXT + length]
    if length > SLOT - TEXT or seal != _seal((most_input, most_output), text):
        return None
    if not (cached <= given <= most_input and output <= most_output and energy <= MOST):
        return None
    try:
        organisation, tenant, request_id, owner = text.decode().split("\n")
        check_name("organization", organisation)
        check_name("tenant", tenant)
    except (ValueError, InvalidRequest):
        return None  # sealed by somebody else
    return LoggedDelivery(organisation, Progress(request_id, tenant, owner, Delivered(given, cached, output, energy)))


def _seal(claimed: tuple[int, int], text: bytes) -> int:
    return _digest(struct.pack("=2Q", *claimed) + text)


def _digest(data: bytes) -> int:
    """Never that of a free slot."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") | 1
