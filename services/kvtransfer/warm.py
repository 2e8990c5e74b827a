"""Filling the cache tier before anybody asks: system prompts are computed once, put there and pinned."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from baton.core.api import EngineApi, PrefillRun, RegistryApi, TierApi, WarmApi
from baton.core.deadline import Deadline
from baton.core.errors import PeerUnavailable, UnknownModel
from baton.core.streams import closing
from baton.core.types import FilledBlocks, ProcessRecord, Role, StopRules, TokenRequest, WorkerState
from services.kvtransfer.fetcher import prompt_names
from services.kvtransfer.offloader import put_blocks
from services.kvtransfer.prefill_run import until_first_token
from services.kvtransfer.tier_peer import Tiers

ReadBlocks = Callable[[int, int], Awaitable[bytes]]  # ordinal of the first block, how many


class WorkerWarmer:
    """Implements ``WarmApi`` for one worker: computes what its prefix cache lacks and puts all of it into the tier."""

    def __init__(self, engine: EngineApi, tiers: Tiers, *, message_bytes: int) -> None:
        self._engine = engine
        self._tiers = tiers
        self._batch = max(1, message_bytes // engine.card.format.block_bytes)

    async def warm(self, request: TokenRequest) -> tuple[bytes, ...]:
        card = self._engine.card
        if request.model not in ("", card.model):
            raise UnknownModel(f"model: this worker serves {card.model}, got {request.model}")
        tier = self._tiers.find()
        if tier is None:
            raise PeerUnavailable("there is no cache tier")
        asked = replace(request, stop=StopRules(max_tokens=1), logprobs=None, prompt_logprobs=None)
        names = prompt_names(asked, card)
        await Deadline.after(request.timeout).within(self._put(asked, names, tier), "the prompt to warm")
        return tuple(names)

    async def _put(self, request: TokenRequest, names: Sequence[bytes], tier: TierApi) -> None:
        """The blocks stay pinned in the engine until the tier has them."""
        async with self._engine.prefill(request) as run:
            await until_first_token(run, self._put_filled(run, names, tier))

    async def _put_filled(self, run: PrefillRun, names: Sequence[bytes], tier: TierApi) -> None:
        async with closing(run.filled()) as filled:
            async for blocks in filled:
                await self._put_full(run.read_blocks, blocks, names, tier)

    async def _put_full(
        self, read_blocks: ReadBlocks, blocks: FilledBlocks, names: Sequence[bytes], tier: TierApi
    ) -> None:
        """The full ones of these blocks, in messages of bounded size."""
        last = min(blocks.first_block + blocks.block_count, len(names))
        for first in range(blocks.first_block, last, self._batch):
            batch = names[first : min(first + self._batch, last)]
            if await tier.missing(batch):
                payload = await read_blocks(first, len(batch))
                await put_blocks(tier, batch, payload, self._engine.card.format)
            self._tiers.holds(batch)


class FleetWarmer:
    """Implements ``WarmApi`` for the kvtransfer process: has a worker warm the prompt, then pins its blocks."""

    def __init__(self, registry: RegistryApi, workers: Callable[[str], WarmApi], tier: TierApi) -> None:
        """``workers`` gives the worker at an address."""
        self._registry = registry
        self._workers = workers
        self._tier = tier

    async def warm(self, request: TokenRequest) -> tuple[bytes, ...]:
        worker = _choose(await self._registry.processes(), request.model)
        if worker is None:
            raise PeerUnavailable(f"model: no worker that serves {request.model or 'anything'} is ready")
        names = await self._workers(worker.address).warm(request)
        await self._tier.pin(names)
        return names


def _choose(records: Sequence[ProcessRecord], model: str) -> ProcessRecord | None:
    """The least busy worker that serves the model, a prefill worker before others."""
    able = [
        record
        for record in records
        if record.state is WorkerState.READY and record.card is not None and model in ("", record.card.model)
    ]
    return min(able, key=lambda r: (r.role is not Role.PREFILL, r.stats.running + r.stats.waiting, r.id), default=None)
