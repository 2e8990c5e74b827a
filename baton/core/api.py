"""The whole system on one page: what each part offers to the others. (Tenants and quotas: ``tenancy_api``, and what
administrators ask: ``admin_api``.)

Each protocol is satisfied both by the domain class and by its gRPC client in ``baton.rpc``, so a test may join the
parts with or without a wire. Every call raises only ``baton.core.errors``; cancelling a call is the abort.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from baton.core.types import (
    DecodeRequest,
    DevicePool,
    EngineStats,
    FilledBlocks,
    FirstToken,
    GenerateChunk,
    GenerateRequest,
    KvChunk,
    KvConfirmation,
    KvHandshake,
    ModelCard,
    ModelInfo,
    Plan,
    PlanQuery,
    PrefillRequest,
    PrefillResult,
    Principal,
    ProcessRecord,
    Tier,
    TierBlock,
    TierChanges,
    TokenChunk,
    TokenRequest,
)


class GatewayApi(Protocol):
    """The one door. ``generate`` ends normally only after every choice has its last chunk."""

    def generate(self, request: GenerateRequest, principal: Principal) -> AsyncIterator[GenerateChunk]: ...

    async def count_tokens(self, request: GenerateRequest, principal: Principal) -> tuple[int, ...]:
        """The prompt's token ids as ``generate`` would compute them (text or messages)."""
        ...

    async def list_models(self, principal: Principal) -> Sequence[ModelInfo]: ...

    async def get_model(self, model: str, principal: Principal) -> ModelInfo: ...


class PlannerApi(Protocol):
    async def plan(self, query: PlanQuery) -> Plan:
        """Place one request. Overloaded when no ready worker serves the model; UnknownModel when none ever did."""
        ...


class DecodeApi(Protocol):
    def generate(self, request: DecodeRequest) -> AsyncIterator[TokenChunk]:
        """Reserve, have the prompt computed, stream the answer. Closing the iterator frees everything.

        Raises Overloaded when it cannot be admitted, PeerUnavailable when the worker is lost mid-stream.
        """
        ...


class PrefillApi(Protocol):
    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Compute the prompt, ship its blocks to the ticket's receiver, return the first token.

        Holds KV only inside the call. Raises Overloaded at once when the queue is full, Busy (also at once) when it
        would have to wait for longer than ``request.max_wait``, TransferRejected and CorruptTransfer as the receiver
        answers them.
        """
        ...


class KvReceiverApi(Protocol):
    """The receiving end of a hand-over, mounted in every worker. Two phases: offer, then confirm."""

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        """Compare formats; TransferRejected names the field that differs."""
        ...

    def offer(self, chunk: KvChunk) -> Awaitable[None]:
        """Copy the bytes into the reservation's blocks and verify them; its end is the acknowledgement.

        Blocks in ``pieces`` may come as the chunk's ``parts``; some of them may be stored when it fails.

        The offer may be on its way before that is awaited, which the caller does at once.
        """
        ...

    def confirm(self, confirmation: KvConfirmation) -> Awaitable[None]:
        """The source was still pinned at the acknowledgement: only now are the blocks valid.

        Like an offer, it may be on its way before this is awaited.
        """
        ...


class DirectoryApi(Protocol):
    """The ``kvtransfer`` process: which peers exist and which of them hold which prefix blocks."""

    async def announce(self, peer: KvHandshake, address: str) -> None: ...

    async def publish(
        self, worker_id: str, epoch: int, sequence: int, added: Sequence[bytes], removed: Sequence[bytes]
    ) -> bool:
        """Block hashes gained and lost since ``sequence - 1``. False: a gap, send everything again with ``reset``."""
        ...

    async def reset(self, worker_id: str, epoch: int, sequence: int, held: Sequence[bytes]) -> None: ...

    async def holders(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Per worker id, how many leading ``hashes`` it holds."""
        ...

    async def peers(self) -> Sequence[tuple[KvHandshake, str]]: ...


class TierApi(Protocol):
    """The pools' shared cache of full KV blocks by chained hash, in host memory and on disk. Soft state: whatever it
    does not hold is computed again."""

    async def changes(self, epoch: int, version: int) -> TierChanges:
        """What came and went since the version of an earlier answer; all of it for another ``epoch``."""
        ...

    async def missing(self, names: Sequence[bytes]) -> tuple[bytes, ...]:
        """Those that it does not hold."""
        ...

    async def put(self, blocks: Sequence[TierBlock]) -> None:
        """Keep them as long as there is room. CorruptTransfer when one does not match its checksum."""
        ...

    async def get(self, names: Sequence[bytes]) -> tuple[TierBlock, ...]:
        """The leading ones that it holds, verified, as many as fit into a message; counted as hits, what it lacks and
        all that follows as misses."""
        ...

    async def pin(self, names: Sequence[bytes]) -> int:
        """Never evict those of ``names`` that it holds; returns how many. Overloaded when too much would be pinned."""
        ...

    async def unpin(self, names: Sequence[bytes]) -> None: ...

    async def invalidate(self, graph_version: str) -> int:
        """Drop every block tagged with this version of the graph; returns how many."""
        ...


class WarmApi(Protocol):
    """Served by workers, and by the kvtransfer process, which asks one of them and pins the blocks."""

    async def warm(self, request: TokenRequest) -> tuple[bytes, ...]:
        """Have the prompt's full blocks in the cache tier; returns their names. Sampling and stop rules are ignored.

        PeerUnavailable when there is no tier, or no worker that serves the model.
        """
        ...


class RegistryApi(Protocol):
    """Who is alive. A record lives as long as its lease is renewed."""

    async def register(self, record: ProcessRecord, ttl: float) -> None:
        """Write or renew the record of ``record.id`` for ``ttl`` seconds. StateUnavailable within its budget."""
        ...

    async def deregister(self, process_id: str, epoch: int) -> None:
        """Remove the record if it still belongs to ``epoch``."""
        ...

    async def processes(self) -> Sequence[ProcessRecord]: ...


# --- the engine -------------------------------------------------------------------------------------------------------


class WritableBlocks(Protocol):
    """Blocks held for one request; they return to the pool when its ``async with`` ends, whatever happened."""

    @property
    def cached_tokens(self) -> int:
        """Leading context tokens found in this engine's prefix cache, or imported; a multiple of the block size."""
        ...

    async def write_blocks(self, first_block: int, payload: bytes | memoryview) -> None:
        """Copy KV bytes into the request's own blocks, beginning at ordinal ``first_block``."""
        ...

    async def read_blocks(self, first_block: int, block_count: int) -> bytes:
        """The bytes of the blocks, to verify what was written."""
        ...

    def fill_blocks(self, first_block: int, payload: bytes | memoryview, filled: int) -> tuple[bytes, ...]:
        """Copy blocks as they travel, the last one with ``filled`` slots, into the request's own; a digest of each as
        it is stored. Done when it returns, by the caller's thread, in the memory that ``EngineApi.pool`` shows.

        TransferRejected for blocks that are not the request's own, or once it is computed; TransportUnavailable where
        there is no such memory.
        """
        ...

    def copy_blocks(
        self, first_block: int, source: memoryview, source_blocks: Sequence[int], filled: int
    ) -> tuple[bytes, ...]:
        """As ``fill_blocks``, out of a pool of the same layout that is mapped here: ``source`` is all of it. The digest
        of the last block is of its filled slots as they travel. TransportUnavailable also for blocks that the pool has
        not."""
        ...

    async def pull_blocks(
        self, first_block: int, source: int, source_blocks: Sequence[int], filled: int, strong: bytes
    ) -> tuple[bytes, ...]:
        """Copy blocks of the attached GPU's pool ``source`` into the request's own, of the last one ``filled`` slots.

        Returns a digest of each block as it is stored, with both lanes where ``strong``, which has a byte for each
        block, is 1. TransportUnavailable when ``source`` is not, or no longer, attached.
        """
        ...

    async def receive_blocks(
        self, first_block: int, link: int, number: int, filled: int, strong: bytes
    ) -> tuple[bytes, ...]:
        """Take message ``number`` of a link into as many of the reservation's own blocks as ``strong`` has bytes.

        Otherwise as ``pull_blocks``. TransportUnavailable when the link is not joined, or breaks.
        """
        ...


class ImportableBlocks(WritableBlocks, Protocol):
    """A request that has not started, and may start from a prefix that was computed elsewhere."""

    async def imported(self, block_count: int) -> None:
        """The first ``block_count`` blocks are valid, cached or written and verified: they enter the prefix cache, and
        only the rest is computed. That must be at least one token."""
        ...


class Reservation(ImportableBlocks, Protocol):
    """The blocks of a request that is to be answered."""

    def decode(self, first: FirstToken | None) -> AsyncIterator[TokenChunk]:
        """Stream the answer. ``first`` None: compute what is not cached here; else all of it was written to the blocks.

        With ``first`` its token is not streamed again; the stream begins with the second one.
        """
        ...


class PrefillRun(Protocol):
    """A prompt being computed; its blocks stay pinned until its ``async with`` ends."""

    @property
    def cached_tokens(self) -> int: ...

    def filled(self) -> AsyncIterator[FilledBlocks]:
        """Blocks in order as their KV becomes final; ends when that of the whole context is there (prefix hits
        included), perhaps before the first token is. That may still fail, and then the blocks are worth nothing.

        The last one may be partly filled.
        """
        ...

    async def read_blocks(self, first_block: int, block_count: int) -> bytes: ...

    def block_ids(self, first_block: int, block_count: int) -> tuple[int, ...]:
        """Where these blocks stand in the engine's pool."""
        ...

    async def digest_blocks(self, first_block: int, filled: int, strong: bytes) -> tuple[bytes, ...]:
        """16 bytes for each block in a GPU's pool (``baton.engine.digest``), ``filled`` slots of the last one."""
        ...

    async def send_blocks(
        self, first_block: int, link: int, number: int, filled: int, strong: bytes
    ) -> tuple[bytes, ...]:
        """Send the blocks as message ``number`` of a link; returns what ``digest_blocks`` does, when they are read."""
        ...

    async def first_token(self) -> FirstToken:
        """Comes after the last blocks, or fails for the whole prompt, whatever was told of its blocks."""
        ...


class HeldPrefill(ImportableBlocks, PrefillRun, Protocol):
    """A prompt that may still be waiting for its word; ``filled`` tells of imported blocks, too."""

    def start(self) -> None:
        """Compute what is not cached. Does nothing when that has begun by itself."""
        ...


class SharedPool(Protocol):
    """An engine's KV pool as its front sees it: memory, for reading, that other processes of the host may map too."""

    @property
    def fd(self) -> int: ...

    @property
    def view(self) -> memoryview:
        """All blocks, one after another. What stands in one is final once it was reported as filled."""
        ...


class KvLinks(Protocol):
    """An engine's links to others, each one way, from rank 0 to rank 1."""

    async def invite(self) -> bytes:
        """What another engine needs to join. TransportUnavailable when this one cannot make it."""
        ...

    def join(self, link: int, rank: int, invitation: bytes, seconds: float) -> None:
        """Begin to join; one that is known is left as it is. ``seconds`` bounds everything that happens on it."""
        ...

    def leave(self, link: int) -> None: ...

    def discard(self, link: int, number: int, block_count: int) -> None:
        """Message ``number`` is wanted no more; its place is kept, so that those after it get through."""
        ...


class EngineApi(Protocol):
    """The inference engine as its front sees it. Both calls raise Overloaded when their bounded queue is full."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot; refreshed by every step."""
        ...

    def tokens_before(self, tier: Tier) -> int:
        """Of prompts that are computed before one of ``tier`` that came now: those of ``stats``, and prefills of no
        lower tier that were asked for since or wait for their admission."""
        ...

    @property
    def pool(self) -> SharedPool | None:
        """None where the pool's memory cannot be shared."""
        ...

    @property
    def device_pool(self) -> DevicePool | None:
        """The pool in GPU memory, where engines of the same host can map it."""
        ...

    @property
    def links(self) -> KvLinks | None:
        """None where the engine has no communicators."""
        ...

    def attach(self, pool: DevicePool) -> int:
        """Let the engine map the pool of another one; returns the name for ``Reservation.pull_blocks``."""
        ...

    def detach(self, source: int) -> None:
        """Unmap it; whatever was asked before is done first."""
        ...

    def reserve(self, request: TokenRequest, compute_up_to: int = 0) -> AbstractAsyncContextManager[Reservation]:
        """Admit: hold blocks for the context and the growth window, sharing prefix hits. Waits its turn among
        tenants and tiers.

        With at most ``compute_up_to`` uncached context tokens the engine begins to compute them at once: the caller,
        who would only have answered ``decode(None)``, is spared a round trip and calls it to listen.
        InvalidRequest when the request can never fit.
        """
        ...

    def prefill(
        self, request: TokenRequest, compute_up_to: int | None = None
    ) -> AbstractAsyncContextManager[HeldPrefill]:
        """With more than ``compute_up_to`` uncached tokens it waits for ``start``; None: it never waits."""
        ...

    def leading_cached(self, names: Sequence[bytes]) -> int:
        """How many leading ``names`` are in the prefix cache, as of the last report."""
        ...

    async def read_cached(self, names: Sequence[bytes]) -> bytes:
        """The bytes of the leading ``names`` that are in the prefix cache, one block after another."""
        ...
