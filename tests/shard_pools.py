"""A real engine whose KV stands in the pools of several shards, as tensor parallelism would have it.

What others see of the engine are the shards' parts of each block; the model inside computes on whole ones. After each
step the blocks that it has written are split, and blocks that came from elsewhere are joined before it reads them. So
whatever it decodes from has been where a hand-over has put it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from baton.core.types import ModelCard
from baton.engine.config import EngineConfig
from baton.engine.load import build_runner
from baton.engine.runner import Part, Runner, StepResult
from baton.engine.sharedpool import PoolMemory, shared_pool_memory
from tests.real_engines import GatedRunner
from tests.runner_around import RunnerAround


@dataclass(frozen=True)
class ShardedConfig(EngineConfig):
    shards: int = 1


class ShardedRunner(RunnerAround):
    """``shards``: each has an equal run of the heads of each layer."""

    def __init__(self, inner: Runner, shards: int) -> None:
        super().__init__(inner)
        layout = replace(inner.card.format, shards=shards)
        memory = shared_pool_memory(inner.total_blocks, layout)
        assert memory is not None
        memory.on_fill = self._came
        self._card, self._memory = replace(inner.card, format=layout), memory
        self._from_elsewhere: set[int] = set()
        self._parts: list[Part] = []

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def memory(self) -> PoolMemory | None:
        return self._memory

    def launch(self, parts: Sequence[Part]) -> None:
        needed = sorted({block for part in parts for block in part.blocks} & self._from_elsewhere)
        if needed:
            self._inner.write_blocks(needed, self._joined(self.read_blocks(needed)))
        self._from_elsewhere.difference_update(needed)
        self._parts = [part._replace(blocks=list(part.blocks)) for part in parts]
        self._inner.launch(parts)

    def has_filled(self) -> bool:
        return False  # the shards' pools are filled at the end

    def collect(self) -> StepResult:
        result, size = self._inner.collect(), self.card.format.block_size
        for part in self._parts:
            written = part.blocks[part.start // size : -(-part.end // size)]
            self._put(written, self._split(self._inner.read_blocks(written)))
        return result

    def read_blocks(self, blocks: Sequence[int]) -> bytes:
        size = self.card.format.block_bytes
        return b"".join(self._memory.view[block * size : (block + 1) * size] for block in blocks)

    def write_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        self._put(blocks, payload)
        self._came(blocks)

    def close(self) -> None:
        self._memory.close()
        self._inner.close()

    def _came(self, blocks: Sequence[int]) -> None:
        self._from_elsewhere.update(blocks)

    def _put(self, blocks: Sequence[int], payload: bytes) -> None:
        size = self.card.format.block_bytes
        for index, block in enumerate(blocks):
            self._memory.view[block * size : (block + 1) * size] = payload[index * size : (index + 1) * size]

    def _split(self, whole: bytes) -> bytes:
        """[blocks, layers, 2, shards, heads of one, row] to [blocks, shards, layers, 2, heads of one, row]."""
        return self._as_words(whole, by_shard=False).transpose(0, 3, 1, 2, 4, 5).tobytes()

    def _joined(self, parts: bytes) -> bytes:
        return self._as_words(parts, by_shard=True).transpose(0, 2, 3, 1, 4, 5).tobytes()

    def _as_words(self, payload: bytes, *, by_shard: bool) -> NDArray[np.uint8]:
        layout = self.card.format
        heads = layout.kv_heads // layout.shards
        shape = (layout.shards, layout.layers, 2, heads) if by_shard else (layout.layers, 2, layout.shards, heads)
        row = layout.block_bytes // (layout.layers * 2 * layout.kv_heads)
        return np.frombuffer(payload, np.uint8).reshape(-1, *shape, row)


def sharded(config: EngineConfig, on_step: Callable[[Sequence[Part]], None]) -> Runner:
    """For ``Stack.runner``."""
    assert isinstance(config, ShardedConfig)
    return GatedRunner(ShardedRunner(build_runner(config), config.shards), on_step)
