"""A hand-over whose calls overtake one another, come twice, fail, are cancelled or lie: what is valid is right, and
everything ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.api import KvReceiverApi, PrefillRun, WritableBlocks
from baton.core.clock import ManualClock
from baton.core.errors import BatonError, TransportUnavailable
from baton.core.telemetry import SilentMeter
from baton.core.types import Attempt, FilledBlocks, KvChunk, KvConfirmation, KvFormat, KvHandshake, KvSource, Ticket
from services.kvtransfer.checksum import block_checksums
from services.kvtransfer.config import ChecksumPolicy, KvTransferConfig
from services.kvtransfer.handshake import FEATURES
from services.kvtransfer.receiver import KvReceiver
from services.kvtransfer.sender import KvSender
from services.kvtransfer.tcp import TcpIncoming, TcpOutgoing
from services.kvtransfer.transport import Digests, EarlyChunk, TransportName, require_equal
from tests.gates import GENEROUS_SECONDS
from tests.unit.services.kvtransfer.doubles import Held, Run

FORMAT = KvFormat("fake", 4, 1, 1, 8)
SIZE = FORMAT.block_bytes
FULL = ChecksumPolicy.FULL
BLOCKS = 6


def block(ordinal: int) -> bytes:
    return bytes([ordinal + 1]) * SIZE


class Fate:
    """Seeded: whether this fault happens now, and how long this takes."""

    def __init__(self, seed: int, rate: float) -> None:
        self.random = Random(seed)
        self._rate = rate

    def strikes(self) -> bool:
        return self.random.random() < self._rate

    async def turns(self, most: int = 4) -> None:
        for _ in range(self.random.randrange(most)):
            await asyncio.sleep(0)


class Memory(Held):
    """The receiver's blocks, filled by an engine: in order, half a block at a time, and to the end, whoever waits."""

    def __init__(self, fate: Fate, source: dict[int, bytes]) -> None:
        super().__init__(FORMAT)
        self._fate = fate
        self._source = source
        self._last: asyncio.Task[Any] | None = None

    async def write_blocks(self, first_block: int, payload: bytes | memoryview) -> None:
        came = bytes(payload)
        blocks = range(first_block, first_block + len(came) // SIZE)
        await self._in_order(self._fill(blocks, lambda b: came[(b - first_block) * SIZE :][:SIZE]))

    async def pull_blocks(
        self, first_block: int, source: int, source_blocks: Sequence[int], filled: int, strong: bytes
    ) -> tuple[bytes, ...]:
        blocks = range(first_block, first_block + len(source_blocks))
        return await self._in_order(self._fill(blocks, lambda b: self._source[source_blocks[b - first_block]]))

    async def read_blocks(self, first_block: int, block_count: int) -> bytes:
        async def read() -> bytes:
            return b"".join(
                self.stored.get(each, bytes(SIZE)) for each in range(first_block, first_block + block_count)
            )

        return await self._in_order(read())

    async def _fill(self, blocks: range, origin: Callable[[int], bytes]) -> Digests:
        found: list[bytes] = []
        for ordinal in blocks:
            begun = origin(ordinal)[: SIZE // 2]
            self.stored[ordinal] = begun + bytes(SIZE // 2)
            await self._fate.turns(2)
            whole = begun + origin(ordinal)[SIZE // 2 :]
            self.stored[ordinal] = bytes(SIZE) if self._fate.strikes() else whole
            found += block_checksums(self.stored[ordinal], ordinal, 1, SIZE)
        return tuple(found)

    async def _in_order(self, work: Coroutine[Any, Any, Any]) -> Any:
        self._last = asyncio.create_task(self._after(self._last, work))
        return await asyncio.shield(self._last)

    async def _after(self, before: asyncio.Task[Any] | None, work: Coroutine[Any, Any, Any]) -> Any:
        if before is not None:
            await asyncio.wait({before})
        return await work


class Mapping(TcpOutgoing):
    """Names blocks of ``source``, and digests them while they are copied."""

    name = TransportName.SHM

    def __init__(self, fate: Fate, source: dict[int, bytes]) -> None:
        super().__init__(FORMAT, FULL)
        self._fate = fate
        self._source = source

    async def chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> KvChunk:
        checksums = await self._digests(blocks)
        return KvChunk(ticket, blocks.first_block, blocks.block_count, b"", checksums, self._named(blocks))

    def early_chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> EarlyChunk | None:
        count, late = blocks.block_count, b"\1" * blocks.block_count
        chunk = KvChunk(ticket, blocks.first_block, count, b"", source=self._named(blocks), late_checksums=late)
        return EarlyChunk(chunk, lambda: self._digests(blocks))

    def _named(self, blocks: FilledBlocks) -> KvSource:
        return KvSource(1, tuple(blocks.ordinals), self.name)

    async def _digests(self, blocks: FilledBlocks) -> Digests:
        found: list[bytes] = []
        for ordinal in blocks.ordinals:
            await self._fate.turns()
            found += block_checksums(self._source[ordinal], ordinal, 1, SIZE)
        if self._fate.strikes():
            raise TransportUnavailable("this worker is ending")
        return tuple(found)


class Mapped(TcpIncoming):
    name = TransportName.SHM

    def __init__(self, fate: Fate) -> None:
        super().__init__(FORMAT, FULL)
        self._fate = fate

    async def store(  # type: ignore[override] - TCP verifies at once
        self, chunk: KvChunk, reservation: WritableBlocks, tokens: int
    ) -> Digests | None:
        assert chunk.source is not None
        if self._fate.strikes():
            raise TransportUnavailable("the pool is not mapped")
        blocks, strong = chunk.source.blocks, b"\1" * chunk.block_count
        found = await reservation.pull_blocks(chunk.first_block, 1, blocks, FORMAT.block_size, strong)
        if self._fate.strikes():
            raise TransportUnavailable("the sender has called anew meanwhile")
        if chunk.late_checksums:
            return found
        require_equal(found, chunk, when="as stored")
        return None


class Wire(KvReceiverApi):
    """The way to ``receiver``. Calls take turns, may come twice, and go on there for a while when they are cancelled.
    ``valid``: the blocks that were confirmed, looked at as soon as they are."""

    def __init__(self, fate: Fate, receiver: KvReceiver, memory: Memory) -> None:
        self._fate = fate
        self._receiver = receiver
        self._memory = memory
        self.tasks: set[asyncio.Task[None]] = set()
        self.valid: set[int] = set()

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return await self._receiver.handshake(hello)

    async def offer(self, chunk: KvChunk) -> None:
        await self._call(lambda: self._receiver.offer(chunk))

    async def confirm(self, confirmation: KvConfirmation) -> None:
        await self._call(lambda: self.confirmed(confirmation))

    async def confirmed(self, confirmation: KvConfirmation) -> None:
        await self._receiver.confirm(confirmation)
        first = confirmation.first_block
        self.valid.update(range(first, first + confirmation.block_count))
        self.require_right()

    def require_right(self) -> None:
        assert all(self._memory.stored[ordinal] == block(ordinal) for ordinal in self.valid)

    async def _call(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._begin(call)
        if self._fate.strikes():
            self._begin(call, 60)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_soon(task.cancel)
            raise

    def _begin(self, call: Callable[[], Coroutine[Any, Any, None]], turns: int = 10) -> asyncio.Task[None]:
        async def carried() -> None:
            await self._fate.turns(turns)
            await call()
            await self._fate.turns()

        task = asyncio.create_task(carried())
        self.tasks.add(task)
        return task

    async def lie(self, ticket: Ticket) -> None:
        """Confirms what it likes."""
        fate, right = self._fate, [block_checksums(block(each), each, 1, SIZE)[0] for each in range(BLOCKS)]
        while fate.random.random() < 0.8:
            await fate.turns(10)
            first, count = fate.random.randrange(-1, BLOCKS), fate.random.randrange(BLOCKS + 2)
            told = [right[each % BLOCKS] for each in range(first, first + count)]
            lies = (told, told[1:], [*told, bytes(16)], [bytes(16)] * count, [b""] * count, [], told[::-1])
            confirmation = KvConfirmation(ticket, first, count, tuple(fate.random.choice(lies)))
            self._begin(lambda told=confirmation: self.confirmed(told))


class World:
    def __init__(self, seed: int, rate: float) -> None:
        self.fate = fate = Fate(seed, rate)
        self.source = {ordinal: block(ordinal) for ordinal in range(BLOCKS)}
        self.memory = Memory(fate, self.source)
        features = FEATURES if fate.random.random() < 0.8 else ()
        clock = ManualClock()
        here = KvHandshake("d", 2, "m", "h", FORMAT, features=features, transports=("shm", "tcp"))
        self.receiver = KvReceiver(
            here, "d:1", TcpIncoming(FORMAT, FULL), Mapped(fate), meter=SilentMeter(), clock=clock
        )
        self.wire = Wire(fate, self.receiver, self.memory)
        self.sender = KvSender(
            KvHandshake("p", 1, "m", "h", FORMAT),
            lambda _: self.wire,
            [Mapping(fate, self.source), TcpOutgoing(FORMAT, FULL)],
            config=replace(
                KvTransferConfig(max_mapped_bytes=fate.random.choice((2, 8)) * SIZE, max_message_bytes=SIZE),
                # A chunk that comes twice and fails the second time leaves a confirmation waiting.
                acknowledge_seconds=0.1 if rate else GENEROUS_SECONDS,
            ),
            meter=SilentMeter(),
            clock=clock,
        )

    def run(self) -> Run:
        """A prompt that is computed in pieces of any size."""
        bounds = sorted({0, BLOCKS, *self.fate.random.sample(range(BLOCKS), 2)})
        pieces = [FilledBlocks(a, b - a, b * FORMAT.block_size) for a, b in pairwise(bounds)]
        return Run(self.source.__getitem__, pieces, turns=self.fate.random.randrange(8))

    async def hand_over(self) -> bool:
        """Whether it came to its end."""
        fate, skip = self.fate, self.fate.random.randrange(3)
        tokens = BLOCKS * FORMAT.block_size
        async with self.receiver.accept(
            "r", Attempt(0, 1), self.memory, skip_blocks=skip, context_tokens=tokens
        ) as delivery:
            shipping = asyncio.create_task(self.sender.ship(delivery.ticket, self.run(), skip))
            if fate.strikes():
                await self.wire.lie(delivery.ticket)
            if fate.strikes():
                await fate.turns(60)
                shipping.cancel()
            await asyncio.wait({shipping})
            self.source.update(dict.fromkeys(self.source, b"\xff" * SIZE))  # they are used again
            is_whole = not shipping.cancelled() and shipping.exception() is None
            if is_whole:
                self.receiver.require_complete(delivery)
                assert self.wire.valid == set(range(skip, BLOCKS))
            for _ in range(80):
                await asyncio.sleep(0)
                self.wire.require_right()
        ends = await asyncio.gather(shipping, *self.wire.tasks, return_exceptions=True)
        assert all(end is None or isinstance(end, int | BatonError | asyncio.CancelledError) for end in ends), ends
        return is_whole


async def played(seed: int, rate: float) -> bool:
    world = World(seed, rate)
    async with asyncio.timeout(GENEROUS_SECONDS):
        is_whole = await world.hand_over()
        while asyncio.all_tasks() != {asyncio.current_task()}:  # the engine's copies that nobody waits for
            await asyncio.sleep(0)
    assert world.receiver.open_tickets == 0
    return is_whole


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rate=st.sampled_from((0.0, 0.02, 0.1, 0.3)))
def test_what_is_valid_is_right_and_everything_ends(seed: int, rate: float) -> None:
    assert asyncio.run(played(seed, rate)) or rate > 0
