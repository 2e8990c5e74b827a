"""Prefix blocks from the cache tier into a request that has not started: fetched when that beats computing them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from baton.core.api import EngineApi, ImportableBlocks, TierApi
from baton.core.blockhash import block_hashes, request_root
from baton.core.clock import Clock
from baton.core.errors import BatonError, CorruptTransfer, PeerUnavailable
from baton.core.telemetry import Meter
from baton.core.types import ModelCard, TierBlock, TokenRequest
from services.kvtransfer.checksum import verify_named
from services.kvtransfer.economy import FetchEconomy
from services.kvtransfer.tcp import written_and_read_back
from services.kvtransfer.tier_peer import Tiers

log = logging.getLogger(__name__)

T = TypeVar("T")

GETS_IN_FLIGHT = 3


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """``names`` of a request's leading blocks; those that this worker lacks are in the tier."""

    names: tuple[bytes, ...]


def prompt_names(request: TokenRequest, card: ModelCard) -> list[bytes]:
    """The chained hashes of the full blocks of prompt and generated tokens, as the engine names them."""
    return list(_names(request, card))


def _names(request: TokenRequest, card: ModelCard) -> Iterator[bytes]:
    context = (*request.prompt, *request.generated)
    return block_hashes(request_root(request, card), context, card.format.block_size)


class PrefixFetcher:
    """Whatever goes wrong, the request goes on and computes what did not come. A block becomes part of the request, and
    of the prefix cache, only after its checksum was verified both as received and as stored.
    """

    def __init__(
        self,
        engine: EngineApi,
        tiers: Tiers,
        economy: FetchEconomy,
        *,
        message_bytes: int,
        answer_seconds: float,
        meter: Meter,
        clock: Clock,
    ) -> None:
        """``answer_seconds``: longest silence of the tier in a fetch."""
        self._engine = engine
        self._layout = engine.card.format
        self._tiers = tiers
        self._economy = economy
        self._batch = max(1, message_bytes // self._layout.block_bytes)
        self._answer_seconds = answer_seconds
        self._clock = clock
        self._bytes = meter.counter("tier_fetched_bytes", "KV bytes fetched from the cache tier instead of computed")
        self._seconds = meter.histogram(
            "tier_fetch_seconds", "One fetch, from the first call to the last verified block"
        )
        self._lookups = meter.counter(
            "tier_lookups", "Requests by whether the cache tier has enough of what this worker lacks", ("result",)
        )
        self._failures = meter.counter("tier_fetch_failures", "Fetches that ended early", ("cause",))

    def look_up(self, request: TokenRequest) -> FoundPrefix | None:
        """What is worth fetching for this request: blocks that follow those cached here. None: nothing is.

        Nobody is asked, and no block named beyond the first one that is neither here nor there.
        """
        sharable = (request.context_tokens - 1) // self._layout.block_size  # the last token's logits are needed
        if not self._tiers.is_there or request.prompt_logprobs is not None or not self._pays(sharable):
            return None
        names: list[bytes] = []
        local = 0
        for name in islice(_names(request, self._engine.card), sharable):
            if local == len(names) and self._engine.leading_cached((name,)):
                local += 1
            elif not self._tiers.leading((name,)):
                break
            names.append(name)
        if local == sharable:
            return None
        pays = self._pays(len(names) - local)
        self._lookups.add(result="hit" if pays else "miss")
        return FoundPrefix(tuple(names)) if pays else None

    async def fetch(self, found: FoundPrefix, blocks: ImportableBlocks) -> None:
        """Import what ``blocks``, admitted by now, still lack of ``found``; as much of it as comes in time."""
        first = valid = blocks.cached_tokens // self._layout.block_size
        tier = self._tiers.find()
        if tier is None or first >= len(found.names):
            return
        began = self._clock.now()
        try:
            async with asyncio.timeout(self._budget(len(found.names) - first)):
                async with aclosing(self._batches(tier, found.names[first:])) as batches:
                    async for batch in batches:
                        await self._store(blocks, valid, batch)
                        valid += len(batch)
        except TimeoutError:
            self._give_up(PeerUnavailable("the cache tier is slower than computing"))
        except BatonError as error:
            self._give_up(error)
        if valid == first:
            return
        await blocks.imported(valid)
        fetched, seconds = (valid - first) * self._layout.block_bytes, self._clock.now() - began
        self._economy.moved(fetched, seconds)
        self._bytes.add(fetched)
        self._seconds.observe(seconds)

    async def _batches(self, tier: TierApi, names: Sequence[bytes]) -> AsyncGenerator[Sequence[TierBlock], None]:
        """The blocks in order, several calls ahead of their use; ends early where the tier holds no more."""
        wanted = deque(tuple(names[start : start + self._batch]) for start in range(0, len(names), self._batch))
        calls: deque[tuple[tuple[bytes, ...], asyncio.Task[tuple[TierBlock, ...]]]] = deque()
        try:
            while wanted or calls:
                while wanted and len(calls) < GETS_IN_FLIGHT:
                    batch = wanted.popleft()
                    calls.append((batch, asyncio.create_task(self._get(tier, batch))))
                batch, call = calls.popleft()
                blocks = await call
                self._check(batch, blocks)
                if blocks:
                    yield blocks
                if len(blocks) < len(batch):
                    self._tiers.lacks(batch[len(blocks)])
                    return
        finally:
            for _, call in calls:
                call.cancel()
            await asyncio.gather(*(call for _, call in calls), return_exceptions=True)

    async def _get(self, tier: TierApi, names: Sequence[bytes]) -> tuple[TierBlock, ...]:
        return await self._answered(tier.get(names))

    def _check(self, names: Sequence[bytes], blocks: Sequence[TierBlock]) -> None:
        if len(blocks) > len(names):
            raise CorruptTransfer(f"the cache tier sent {len(blocks)} blocks, asked for {len(names)}")
        for name, block in zip(names, blocks, strict=False):
            if block.name != name or len(block.payload) != self._layout.block_bytes:
                raise CorruptTransfer(f"the cache tier sent another block than {name.hex()}")
            verify_named(name, block.payload, block.checksum, when="as received")

    async def _store(self, blocks: ImportableBlocks, first: int, batch: Sequence[TierBlock]) -> None:
        payload = batch[0].payload if len(batch) == 1 else b"".join(block.payload for block in batch)
        stored = memoryview(await written_and_read_back(blocks, first, len(batch), payload))
        size = self._layout.block_bytes
        for index, block in enumerate(batch):
            verify_named(block.name, stored[index * size : (index + 1) * size], block.checksum, when="as stored")

    async def _answered(self, call: Awaitable[T]) -> T:
        """A tier that is silent is lost, and left alone for a while."""
        limit = asyncio.timeout(self._answer_seconds)
        try:
            async with limit:
                return await call
        except TimeoutError as error:
            if not limit.expired():
                raise
            silent = PeerUnavailable(f"the cache tier did not answer within {self._answer_seconds:g} s")
            self._tiers.lost(silent.message)
            raise silent from error
        except PeerUnavailable as error:
            self._tiers.lost(error.message)
            raise

    def _pays(self, block_count: int) -> bool:
        return self._economy.pays(block_count * self._layout.block_size, block_count * self._layout.block_bytes)

    def _budget(self, block_count: int) -> float:
        """Seconds after which a fetch is given up: it has taken twice what computing takes."""
        return self._answer_seconds + 2 * self._economy.compute_seconds(block_count * self._layout.block_size)

    def _give_up(self, error: BatonError) -> None:
        self._failures.add(cause=error.reason)
        log.info("the cache tier did not give all of a prefix", extra={"cause": error.reason, "error": error.message})
