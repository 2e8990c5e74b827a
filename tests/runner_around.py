"""A runner around another one, for tests that change what it does or look at what it is asked for. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.core.types import ModelCard
from baton.engine.device_copies import DeviceCopies
from baton.engine.runner import Part, Runner, RunnerTimes, StepResult
from baton.engine.sharedpool import PoolMemory


class RunnerAround:
    """A runner around another one, which does all that a subclass does not do itself."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner

    @property
    def card(self) -> ModelCard:
        return self._inner.card

    @property
    def total_blocks(self) -> int:
        return self._inner.total_blocks

    @property
    def memory(self) -> PoolMemory | None:
        return self._inner.memory

    @property
    def copies(self) -> DeviceCopies | None:
        return self._inner.copies

    @property
    def steps_ahead(self) -> int:
        return self._inner.steps_ahead

    @property
    def times(self) -> RunnerTimes:
        return self._inner.times

    def launch(self, parts: Sequence[Part]) -> None:
        self._inner.launch(parts)

    def while_waiting(self, look: Callable[[], None]) -> None:
        self._inner.while_waiting(look)

    def has_filled(self) -> bool:
        return self._inner.has_filled()

    def collect(self) -> StepResult:
        return self._inner.collect()

    def forget(self, key: int) -> None:
        self._inner.forget(key)

    def read_blocks(self, blocks: Sequence[int]) -> bytes:
        return self._inner.read_blocks(blocks)

    def write_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        self._inner.write_blocks(blocks, payload)

    def close(self) -> None:
        self._inner.close()
