"""The hand-over of KV blocks: formats, tickets, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from baton.core.types.tokens import Attempt

PART_BYTES = 2 << 20  # of one message among several; smaller ones cost more Python, larger ones miss the caches


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How KV bytes are laid out. Blocks of another ``block_size`` or of other ``shards`` can be converted, all else has
    to be equal where blocks are exchanged.

    A block is [shards, layers, 2 (K, V), kv_heads / shards, block_size, head_dim]: with tensor parallelism each shard
    has an equal run of the model's ``kv_heads``, and its part of each block in one piece.
    """

    dtype: str
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    layout: str = "block-major/1"
    shards: int = 1

    @property
    def block_bytes(self) -> int:
        width = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "fake": 1}[self.dtype]
        return self.layers * 2 * self.kv_heads * self.block_size * self.head_dim * width

    @property
    def token_bytes(self) -> int:
        """Of one token, in all heads and layers."""
        return self.block_bytes // self.block_size

    @property
    def slot_bytes(self) -> int:
        """Of one token in one head of one layer, K or V alone."""
        return self.token_bytes // (self.layers * 2 * self.kv_heads)

    def __str__(self) -> str:
        """Part of every block's name in a cache: blocks of unequal formats never share one."""
        shape = f"{self.layers}x2x{self.kv_heads}x{self.block_size}x{self.head_dim}"
        shards = f":{self.shards} shards" if self.shards > 1 else ""
        return f"{self.layout}:{self.dtype}:{shape}{shards}"


@dataclass(frozen=True, slots=True)
class LocalDoor:
    """A socket on one host, where a sender brings its pool. Its owner gives the token to those whom it lets in."""

    address: str
    token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class KvHandshake:
    """Says who speaks and what it can do; compared field by field, a difference is refused by name.

    ``features``: "reslice" converts blocks of other sizes and shards, "late-checksums" takes checksums with the
    confirmation, "offer-streams" takes offers as bytes one after another, and late checksums of those, "local-packets"
    takes offers and confirmations at its door. ``transports`` empty: "tcp" alone, as a worker says that knows no other.
    ``host`` names the running system of the speaker's host. ``door`` is only in a receiver's answer.
    """

    worker_id: str
    epoch: int
    model: str
    weights_hash: str
    format: KvFormat
    protocol_version: int = 1
    features: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    host: str = ""
    door: LocalDoor | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to fill one reservation's blocks: dies with the decode call that made it."""

    request_id: str
    attempt: Attempt
    receiver_address: str
    receiver_epoch: int


@dataclass(frozen=True, slots=True)
class DevicePool:
    """A KV pool in GPU memory, by what another process of the host needs to map it.

    ``handle`` is the driver's name of the allocation that the pool lies in, ``offset`` where in it the pool begins.
    ``device`` names the GPU, the same in every process.
    """

    handle: bytes = field(repr=False)
    offset: int
    size: int
    device: str


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where blocks stand in the pool of the worker of that ``epoch``.

    ``transport`` is how the receiver is to get them. With "nccl" they come as message ``number`` of ``link``, which the
    receiver joins by ``invitation`` if it does not know it.
    """

    epoch: int
    blocks: tuple[int, ...]
    transport: str = "shm"
    link: int = 0
    number: int = 0
    invitation: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class KvChunk:
    """Consecutive KV blocks of one request, as bytes in the pool's layout; unused token slots at the end are left out.

    In place of a ``payload`` a ``source`` says from where the receiver, who has mapped that pool, is to copy them.
    ``first_block`` is the ordinal in the sequence (block 0 holds positions 0..block_size-1), ``checksums`` one 128-bit
    digest a block (empty when policy turns them off). Where they come with the confirmation, ``late_checksums`` stands
    in for them, with a byte for each block, 1 where both halves of its digest are wanted. A sender may leave a payload
    in ``pieces``, which the wire puts together: they are views of blocks that have to stay as they are until the chunk
    has been answered. ``format`` is that of the sender's blocks, which are counted here, where it is not the
    receiver's.
    """

    ticket: Ticket
    first_block: int
    block_count: int
    payload: bytes | memoryview
    checksums: tuple[bytes, ...] = ()
    source: KvSource | None = None
    format: KvFormat | None = None
    pieces: tuple[bytes | memoryview, ...] = ()
    late_checksums: bytes = b""

    def parts(self, most_bytes: int = PART_BYTES) -> Iterator[KvChunk]:
        """The same blocks, as many at a time as ``most_bytes`` hold, at least one; all at once where their ``pieces``
        are not blocks of the receiver's."""
        blocks = self._part_blocks(most_bytes)
        if blocks >= self.block_count:
            yield self
            return
        for first in range(0, self.block_count, blocks):
            part = slice(first, first + blocks)
            yield replace(
                self,
                first_block=self.first_block + first,
                block_count=len(self.pieces[part]),
                checksums=self.checksums[part],
                late_checksums=self.late_checksums[part],
                pieces=self.pieces[part],
            )

    def undivided(self) -> KvChunk:
        """The same bytes, for who takes them in one message only: with an empty piece more they are no blocks."""
        return replace(self, pieces=(*self.pieces, b"")) if self.pieces else self

    def part_count(self, most_bytes: int = PART_BYTES) -> int:
        return max(1, -(-self.block_count // self._part_blocks(most_bytes)))

    def _part_blocks(self, most_bytes: int) -> int:
        """All are as large as the first one, but for the last one, which may be smaller."""
        if self.format is not None or not self.pieces or len(self.pieces) != self.block_count:
            return max(1, self.block_count)
        return max(1, most_bytes // max(1, len(self.pieces[0])))

    @property
    def body(self) -> bytes | memoryview:
        """The payload in one piece."""
        return b"".join(self.pieces) if self.pieces else self.payload


@dataclass(frozen=True, slots=True)
class KvConfirmation:
    """The sender's answer to an acknowledgement: the offered blocks were still pinned when it came.

    Names blocks as the receiver counts them, whatever the size of the sender's. ``checksums``: one for each block that
    was offered without, an empty one for the others; none at all when all blocks had theirs. They were made while the
    blocks were pinned, which says as much: so with them it may come before the acknowledgement, and waits for it.
    """

    ticket: Ticket
    first_block: int
    block_count: int
    checksums: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class FilledBlocks:
    """Blocks of a prefill in progress whose KV is complete; ``tokens`` is the prompt position reached."""

    first_block: int
    block_count: int
    tokens: int

    @property
    def ordinals(self) -> range:
        return range(self.first_block, self.first_block + self.block_count)

    def filled_slots(self, block_size: int) -> int:
        """Token slots in use of the last block."""
        return self.tokens - (self.first_block + self.block_count - 1) * block_size

    def part(self, first: int, count: int, block_size: int) -> FilledBlocks:
        """``count`` of the blocks from ordinal ``first`` on, and no more tokens than they hold."""
        return FilledBlocks(first, count, min(self.tokens, (first + count) * block_size))
