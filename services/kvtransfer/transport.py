"""The seam between a hand-over and the way its bytes take. Tickets, acknowledgements and confirmations are above it.

A transport has two ends. ``Outgoing`` makes a finished piece of a prompt into a chunk that can be offered, ``Incoming``
gets an offered chunk's bytes into the reservation's blocks and verifies what is stored there.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from baton.core.api import KvReceiverApi, PrefillRun, WritableBlocks
from baton.core.errors import TransferRejected, TransportUnavailable
from baton.core.types import FilledBlocks, KvChunk, KvFormat, KvHandshake, Ticket
from services.kvtransfer.checksum import compare


class TransportName(StrEnum):
    """Fastest first."""

    CUDA_IPC = "cuda-ipc"  # the receiver's GPU copies out of the sender's mapped pool; one host
    NCCL = "nccl"  # from GPU to GPU, by a pair of communicators
    SHM = "shm"  # the receiver's front copies out of the sender's mapped pool; one host, pools on the CPU
    TCP = "tcp"  # the bytes travel in the offer; everywhere

    @property
    def converts(self) -> bool:
        """Whether the receiver's front sees the bytes, and can make blocks of its own layout of them."""
        return self in (TransportName.SHM, TransportName.TCP)


Digests = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EarlyChunk:
    """A chunk whose ``checksums`` are to be computed while the receiver copies."""

    chunk: KvChunk
    checksums: Callable[[], Coroutine[Any, Any, Digests]]


class Outgoing(Protocol):
    @property
    def name(self) -> TransportName: ...

    def reaches(self, receiver: KvHandshake) -> bool:
        """Whether it is worth trying with this receiver, going by what it said of itself."""
        ...

    async def open(self, receiver: KvHandshake) -> None:
        """Make ready for chunks to this receiver; at once when it is. TransportUnavailable when that fails."""
        ...

    def forget(self, receiver: KvHandshake) -> None:
        """It failed towards this receiver: what there is for it alone is to be made anew next time."""
        ...

    def receiver(self, hello: KvHandshake, usual: KvReceiverApi) -> KvReceiverApi:
        """Who takes offers and confirmations for the receiver that says ``hello``: ``usual``, or a shorter way."""
        ...

    def is_streamed(self, receiver: KvHandshake) -> bool:
        """Whether an offer of blocks goes there as one message after another, and may be larger than one."""
        ...

    async def chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> KvChunk:
        """What to offer for these blocks of ``run``, of which the last one may be partly filled."""
        ...

    def early_chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> EarlyChunk | None:
        """The same for a receiver that takes checksums later; None where nothing is won by it."""
        ...


class Incoming(Protocol):
    @property
    def name(self) -> TransportName: ...

    async def store(self, chunk: KvChunk, reservation: WritableBlocks, tokens: int) -> Digests | None:
        """Fill the reservation's blocks with ``tokens`` tokens of KV, as the chunk says. Returns digests of what is
        stored if they are still to be compared with checksums that come later.

        TransferRejected when the chunk does not fit that, CorruptTransfer when the bytes do not fit its checksums,
        TransportUnavailable when it should be offered another way.
        """
        ...

    def read(self, chunk: KvChunk, layout: KvFormat, tokens: int) -> bytes:
        """The bytes of a chunk of another layout as they travel, ``tokens`` of them, verified; to be converted.

        As ``store``; TransferRejected also from a transport whose ``converts`` is false.
        """
        ...

    def abandon(self, ticket: Ticket) -> None:
        """The ticket was closed: no ``store`` under it is to wait for what a sender has yet to do."""
        ...

    def decline(self, chunk: KvChunk) -> None:
        """The chunk was refused before ``store``: its bytes, where they come by themselves, are wanted no more."""
        ...


def transport_of(chunk: KvChunk) -> TransportName:
    """By which the chunk's bytes come. TransportUnavailable when this worker has never heard of it."""
    if chunk.source is None:
        return TransportName.TCP
    try:
        return TransportName(chunk.source.transport)
    except ValueError as error:
        raise TransportUnavailable(f"transport {chunk.source.transport} is not known here") from error


def spoken(hello: KvHandshake) -> Sequence[str]:
    """The transports that a peer knows; one that says nothing is of a version that knew only one."""
    return hello.transports or (TransportName.TCP.value,)


def not_converted(name: TransportName) -> TransferRejected:
    """What a transport answers that converts nothing."""
    return TransferRejected(f"format: blocks of another layout do not come by {name}")


def require_checksums(chunk: KvChunk) -> None:
    if len(chunk.checksums) != chunk.block_count:
        raise TransferRejected(
            f"checksums: one for each of {chunk.block_count} blocks is required, got {len(chunk.checksums)}"
        )


def require_late_checksums(chunk: KvChunk) -> None:
    if chunk.checksums or len(chunk.late_checksums) != chunk.block_count:
        raise TransferRejected(
            f"late_checksums: a byte for each of {chunk.block_count} blocks is required and no checksums, got "
            f"{len(chunk.late_checksums)} and {len(chunk.checksums)}"
        )


def require_equal(found: Sequence[bytes], chunk: KvChunk, *, when: str) -> None:
    """CorruptTransfer naming the first block whose digest is not the chunk's."""
    compare(found, chunk.first_block, chunk.checksums, when=when)
