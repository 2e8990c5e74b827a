"""The whole system on one page: what each part offers to the others.

Each protocol is satisfied both by the domain class and by its gRPC client in ``baton.rpc``, so a test may join the
parts with or without a wire. Every call raises only ``baton.core.errors``; cancelling a call is the abort.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from baton.core.types import (
    DecodeRequest,
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

        Holds KV only inside the call. Raises Overloaded at once when the queue is full, TransferRejected and
        CorruptTransfer as the receiver answers them.
        """
        ...


class KvReceiverApi(Protocol):
    """The receiving end of a hand-over, mounted in every worker. Two phases: offer, then confirm."""

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        """Compare formats; TransferRejected names the field that differs."""
        ...

    async def offer(self, chunk: KvChunk) -> None:
        """Copy the bytes into the reservation's blocks and verify them; returning is the acknowledgement."""
        ...

    async def confirm(self, confirmation: KvConfirmation) -> None:
        """The source was still pinned at the acknowledgement: only now are the blocks valid."""
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


class Reservation(Protocol):
    """Blocks held for one request; they return to the pool when its ``async with`` ends, whatever happened."""

    @property
    def cached_tokens(self) -> int:
        """Leading context tokens found in this engine's prefix cache; a multiple of the block size."""
        ...

    async def write_blocks(self, first_block: int, payload: bytes) -> None:
        """Copy KV bytes into the reservation's own blocks, beginning at ordinal ``first_block``."""
        ...

    async def read_blocks(self, first_block: int, block_count: int) -> bytes:
        """The bytes of the blocks, to verify what was written."""
        ...

    def decode(self, first: FirstToken | None) -> AsyncIterator[TokenChunk]:
        """Stream the answer. ``first`` None: compute the context here; else all of it was written to the blocks.

        With ``first`` its token is not streamed again; the stream begins with the second one.
        """
        ...


class PrefillRun(Protocol):
    """A prompt being computed; its blocks stay pinned until its ``async with`` ends."""

    @property
    def cached_tokens(self) -> int: ...

    def filled(self) -> AsyncIterator[FilledBlocks]:
        """Blocks in order as their KV becomes final; ends when the whole context is computed (prefix hits included).

        The last one may be partly filled.
        """
        ...

    async def read_blocks(self, first_block: int, block_count: int) -> bytes: ...

    async def first_token(self) -> FirstToken: ...


class EngineApi(Protocol):
    """The inference engine as its front sees it. Both calls raise Overloaded when their bounded queue is full."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot; refreshed by every step."""
        ...

    def reserve(self, request: TokenRequest, compute_up_to: int = 0) -> AbstractAsyncContextManager[Reservation]:
        """Admit: hold blocks for the context and the growth window, sharing prefix hits. Waits its turn among
        tenants and tiers.

        With at most ``compute_up_to`` uncached context tokens the engine begins to compute them at once: the caller,
        who would only have answered ``decode(None)``, is spared a round trip and calls it to listen.
        InvalidRequest when the request can never fit.
        """
        ...

    def prefill(self, request: TokenRequest) -> AbstractAsyncContextManager[PrefillRun]: ...
