"""Pinned memory that the GPU copies from and to by itself: a step's integers go up, its tokens come down."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_size_t, c_void_p
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.cuda.library import CudaLibrary, stream_lookup
from baton.engine.cuda.step_arrays import StepArrays, StepLayout

_COPIES = 2  # a step is staged while the copy of the one before may still wait in the stream


Copy = Callable[[int, int, int], object]
"""Queues a copy on torch's current stream: address to copy to, address to copy from, bytes. Host memory is pinned."""


def copy_lookup(library: CudaLibrary, device: torch.device) -> Copy:
    """Without torch's layers, which take longer than the call itself. Raises CudaUnavailable without a GPU."""
    copy = library.declare("baton_copy", (c_void_p, c_void_p, c_size_t, c_void_p))
    stream = stream_lookup(device)
    return lambda to, source, size: copy(to, source, size, stream())


class StepBuffer:
    """The step's integers on the device, at addresses that never change, and pinned copies of them that take turns."""

    def __init__(self, layout: StepLayout, device: torch.device, copy: Copy) -> None:
        self._host = [torch.zeros(layout.size, dtype=torch.int32, pin_memory=True) for _ in range(_COPIES)]
        self._staged: list[StepArrays[NDArray[np.int32]]] = [layout.views(host.numpy()) for host in self._host]
        self._copied = [torch.cuda.Event() for _ in range(_COPIES)]
        self._turn = 0
        self._copy = copy
        self._device = torch.zeros(layout.size, dtype=torch.int32, device=device)
        self.arrays: StepArrays[torch.Tensor] = layout.views(self._device)

    def stage(self) -> StepArrays[NDArray[np.int32]]:
        """Host arrays to fill for the next step. Waits only if the copy of the step before the last has not begun."""
        self._turn = (self._turn + 1) % _COPIES
        self._copied[self._turn].synchronize()
        return self._staged[self._turn]

    def upload(self, start: int, end: int) -> None:
        """Queue the copy of elements ``start`` to ``end`` of what was staged last on torch's current stream."""
        offset = start * self._device.itemsize
        to, source = self._device.data_ptr() + offset, self._host[self._turn].data_ptr() + offset
        self._copy(to, source, (end - start) * self._device.itemsize)
        self._copied[self._turn].record()


class Readback:
    """A device tensor's copy in pinned memory, taken as part of the stream and read later."""

    def __init__(self, source: torch.Tensor, copy: Copy) -> None:
        """``source`` is contiguous."""
        self._source = source
        self._copy = copy
        self._host = torch.zeros(source.shape, dtype=source.dtype, pin_memory=True)
        self.values: NDArray[Any] = self._host.numpy()
        """What ``queue`` copied, once an event recorded after it has passed."""

    def queue(self) -> None:
        """Queue the copy on torch's current stream."""
        self._copy(self._host.data_ptr(), self._source.data_ptr(), self._source.nbytes)
