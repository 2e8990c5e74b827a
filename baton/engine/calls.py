"""One request at the front of an engine: what its caller may do with the blocks, and what has come in for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing, suppress
from typing import Protocol

from baton.core.errors import BatonError, PeerUnavailable, TransferRejected, TransportUnavailable
from baton.core.types import FilledBlocks, FirstToken, KvFormat, TokenChunk, TokenRequest
from baton.engine.blockcopy import DIGEST_BYTES
from baton.engine.mailbox import Mailbox
from baton.engine.messages import (
    Abandon,
    Admitted,
    Command,
    Decode,
    Digest,
    Import,
    Invite,
    Join,
    Leave,
    Pull,
    Read,
    Receive,
    Send,
    Write,
)
from baton.engine.ownpool import OwnPool

NOBODY = 0  # no request and no operation has this number


class Link(Protocol):
    """The way to the engine."""

    def send(self, command: Command) -> None:
        """Never waits; PeerUnavailable once the engine has ended."""
        ...

    async def drain(self) -> None:
        """Wait until payloads are on their way."""
        ...

    @property
    def pool(self) -> OwnPool | None:
        """The engine's, if it is host memory that can be shared."""
        ...

    def operation(self) -> AbstractContextManager[tuple[int, Mailbox[bytes]]]:
        """A number for one read or write, and where its answer (for a write: nothing) will be."""
        ...


class Call:
    """What has come in for one request."""

    def __init__(self, key: int, waiting: TokenRequest | None = None) -> None:
        self.key = key
        self.waiting = waiting  # a prefill that is not admitted yet
        self.is_held = False  # its blocks wait to be filled, and the engine does not touch them
        self.admitted: Mailbox[Admitted] = Mailbox()
        self.filled: Mailbox[FilledBlocks] = Mailbox()
        self.first: Mailbox[FirstToken] = Mailbox()
        self.chunks: Mailbox[TokenChunk] = Mailbox()

    def admit(self, admitted: Admitted) -> None:
        self.waiting = None
        self.is_held = not admitted.computing
        self.admitted.put(admitted)

    def fail(self, error: BatonError) -> None:
        self.is_held = False
        for mailbox in (self.admitted, self.filled, self.first, self.chunks):
            mailbox.fail(error)


class _BlockAccess:
    """Satisfies ``baton.core.api.ImportableBlocks``."""

    def __init__(self, link: Link, call: Call, admitted: Admitted, layout: KvFormat) -> None:
        self._link = link
        self._call = call
        self._admitted = admitted
        self._layout = layout
        self._cached_tokens = admitted.cached_tokens

    @property
    def cached_tokens(self) -> int:
        return self._cached_tokens

    async def write_blocks(self, first_block: int, payload: bytes | memoryview) -> None:
        """TransferRejected for blocks that are not the request's own, for parts of blocks, or once it is computed."""
        with self._link.operation() as (op, reply):
            self._link.send(Write(self._call.key, op, first_block, payload))
            await self._link.drain()
            await reply.get()

    def fill_blocks(self, first_block: int, payload: bytes | memoryview, filled: int) -> tuple[bytes, ...]:
        """As ``write_blocks``; TransportUnavailable where the pool is not mapped here.

        The engine does not touch the blocks of a held request, and learns what was filled when it is told to go on.
        """
        pool, blocks = self._own(first_block, -(-len(payload) // self._layout.block_bytes))
        return pool.fill(blocks, payload, first_block, filled)

    def copy_blocks(
        self, first_block: int, source: memoryview, source_blocks: Sequence[int], filled: int
    ) -> tuple[bytes, ...]:
        """As ``fill_blocks``; TransportUnavailable also for blocks that ``source`` has not."""
        pool, blocks = self._own(first_block, len(source_blocks))
        return pool.copy(blocks, source, source_blocks, first_block, filled)

    async def pull_blocks(
        self, first_block: int, source: int, source_blocks: Sequence[int], filled: int, strong: bytes
    ) -> tuple[bytes, ...]:
        """As ``write_blocks``; TransportUnavailable when ``source`` is not, or no longer, attached."""
        with self._link.operation() as (op, reply):
            self._link.send(Pull(self._call.key, op, first_block, source, tuple(source_blocks), filled, strong))
            return _digests(await reply.get())

    async def receive_blocks(
        self, first_block: int, link: int, number: int, filled: int, strong: bytes
    ) -> tuple[bytes, ...]:
        """As ``write_blocks``; TransportUnavailable when the link is not joined, or breaks."""
        with self._link.operation() as (op, reply):
            self._link.send(Receive(self._call.key, op, link, number, first_block, filled, strong))
            try:
                return _digests(await reply.get())
            except asyncio.CancelledError:
                with suppress(PeerUnavailable):  # it ended with the engine
                    self._link.send(Abandon(op))
                raise

    def _own(self, first_block: int, count: int) -> tuple[OwnPool, Sequence[int]]:
        """The pool, and where the request's blocks stand in it, which are to be filled here."""
        pool = self._link.pool
        if pool is None:
            raise TransportUnavailable("the engine's pool is not mapped here")
        if not self._call.is_held:
            raise TransferRejected("the request holds no blocks that wait to be filled")
        first, blocks = self._cached_tokens // self._layout.block_size, self._admitted.blocks
        if not first <= first_block < first_block + count <= len(blocks):
            last = first_block + count - 1
            raise TransferRejected(f"blocks {first_block}..{last}: only {first}..{len(blocks) - 1} may be filled")
        return pool, blocks[first_block : first_block + count]

    async def imported(self, block_count: int) -> None:
        """TransferRejected once it is computed, or for as many blocks as leave nothing to compute."""
        with self._link.operation() as (op, reply):
            self._link.send(Import(self._call.key, op, block_count))
            await reply.get()
        self._cached_tokens = block_count * self._layout.block_size

    async def read_blocks(self, first_block: int, block_count: int) -> bytes:
        """TransferRejected when the request does not hold these blocks."""
        with self._link.operation() as (op, reply):
            self._link.send(Read(self._call.key, op, first_block, block_count))
            return await reply.get()


class EngineReservation(_BlockAccess):
    """Satisfies ``baton.core.api.Reservation``."""

    async def decode(self, first: FirstToken | None) -> AsyncGenerator[TokenChunk, None]:
        if first is not None or not self._admitted.computing:
            self._call.is_held = False
            self._link.send(Decode(self._call.key, first))
        async with aclosing(self._call.chunks.stream()) as chunks:
            async for chunk in chunks:
                yield chunk


class EnginePrefill(_BlockAccess):
    """Satisfies ``baton.core.api.HeldPrefill``."""

    def start(self) -> None:
        if not self._admitted.computing:
            self._call.is_held = False
            self._link.send(Decode(self._call.key, None))

    def filled(self) -> AsyncGenerator[FilledBlocks, None]:
        return self._call.filled.stream()

    def block_ids(self, first_block: int, block_count: int) -> tuple[int, ...]:
        return self._admitted.blocks[first_block : first_block + block_count]

    async def digest_blocks(self, first_block: int, filled: int, strong: bytes) -> tuple[bytes, ...]:
        """TransferRejected when the request does not hold these blocks."""
        with self._link.operation() as (op, reply):
            self._link.send(Digest(self._call.key, op, first_block, filled, strong))
            return _digests(await reply.get())

    async def send_blocks(
        self, first_block: int, link: int, number: int, filled: int, strong: bytes
    ) -> tuple[bytes, ...]:
        """As ``digest_blocks``; TransportUnavailable when the link is not joined, or breaks."""
        with self._link.operation() as (op, reply):
            self._link.send(Send(self._call.key, op, link, number, first_block, filled, strong))
            return _digests(await reply.get())

    async def first_token(self) -> FirstToken:
        return await self._call.first.get()


class EngineLinks:
    """Satisfies ``baton.core.api.KvLinks``."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def invite(self) -> bytes:
        with self._link.operation() as (op, reply):
            self._link.send(Invite(op))
            return await reply.get()

    def join(self, link: int, rank: int, invitation: bytes, seconds: float) -> None:
        self._link.send(Join(link, rank, invitation, seconds))

    def leave(self, link: int) -> None:
        with suppress(PeerUnavailable):  # it ended with the engine
            self._link.send(Leave(link))

    def discard(self, link: int, number: int, block_count: int) -> None:
        self._link.send(Receive(NOBODY, NOBODY, link, number, 0, 1, bytes(block_count)))


def _digests(joined: bytes) -> tuple[bytes, ...]:
    return tuple(bytes(joined[at : at + DIGEST_BYTES]) for at in range(0, len(joined), DIGEST_BYTES))
