"""Pinned memory in which plans wait to be copied to the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PlanStaging:
    """Two pinned buffers that take turns, since the copy out of the last one may still be queued."""

    def __init__(self, size: int) -> None:
        self._buffers = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    @contextmanager
    def lend(self) -> Iterator[torch.Tensor]:
        """A buffer nobody reads. What the block copies out of it must be queued on torch's current stream.

        Waits for the device only when two copies are behind, which is further than the engine runs ahead.
        """
        self._turn ^= 1
        copied = self._copied[self._turn]
        copied.synchronize()
        yield self._buffers[self._turn]
        copied.record()
