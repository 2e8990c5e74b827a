"""Pairs of communicators between the GPUs of two engines, by NCCL (``nccl4py``): ``Communicators`` for real.

A communicator is made without blocking, so joining, sending and receiving all go through "in progress", which has to be
over before anything else is begun on it or on its stream. Nothing is shared between pairs: when one breaks it is
aborted alone. NVLink multicast is left off (``NCCL_NVLS_ENABLE=0``, set where the engine's process begins).
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from baton.core.errors import TransportUnavailable
from baton.engine.cuda.copies import CudaCopies, CudaCopy
from baton.engine.device_copies import SLOT_BYTES, Span

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

SLOTS = 2  # one is packed or unpacked while the other one moves
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t
_URGENT = -1


class NcclCommunicators:
    """Satisfies ``Communicators``. Made by ``nccl_communicators``."""

    def __init__(self, core: ModuleType, copies: CudaCopies) -> None:
        """``core``: the module ``nccl.core``."""
        self._core = core
        self._copies = copies

    def invite(self) -> bytes:
        try:
            return bytes(self._core.get_unique_id())
        except RuntimeError as error:
            raise TransportUnavailable(f"nccl: no invitation: {error}") from error

    def join(self, invitation: bytes, rank: int) -> NcclCommunicator:
        core = self._core
        try:
            ring = torch.empty(SLOTS, SLOT_BYTES, dtype=torch.uint8, device=self._copies.device)
            invited, config = core.UniqueId.from_bytes(invitation), core.NCCLConfig(blocking=False)
            return NcclCommunicator(core.Communicator.init(2, rank, invited, config), 1 - rank, ring, self._copies)
        except (RuntimeError, ValueError) as error:
            raise TransportUnavailable(f"nccl: cannot join: {error}") from error


class NcclCommunicator:
    """Satisfies ``Communicator``."""

    slots = SLOTS
    slot_bytes = SLOT_BYTES

    def __init__(self, communicator: Any, peer: int, ring: torch.Tensor, copies: CudaCopies) -> None:
        """``ring`` uint8 [slots, slot_bytes] on the device."""
        self._communicator = communicator
        self._peer = peer
        self._copies = copies
        self._stream = torch.cuda.Stream(copies.device, priority=_URGENT)
        self._ring = ring

    def is_settled(self) -> bool:
        try:
            state = int(self._communicator.get_async_error())
        except RuntimeError as error:
            raise TransportUnavailable(f"nccl: {error}") from error
        if state not in (_SUCCESS, _IN_PROGRESS):
            raise TransportUnavailable(f"nccl: the pair is broken: ncclResult {state}")
        return state == _SUCCESS

    def pack(self, slot: int, blocks: Sequence[int], span: Span) -> CudaCopy:
        copies = self._copies
        return copies.begin(blocks, None, span, copies.address, self._ring[slot].data_ptr(), copies.local_ctas)

    def unpack(self, slot: int, blocks: Sequence[int], span: Span) -> CudaCopy:
        copies = self._copies
        return copies.begin(None, blocks, span, self._ring[slot].data_ptr(), copies.address, copies.local_ctas)

    def send(self, slot: int, size: int) -> None:
        self._begin(self._communicator.send, slot, size)

    def receive(self, slot: int, size: int) -> None:
        self._begin(self._communicator.recv, slot, size)

    def mark(self) -> StreamMark:
        return StreamMark(self._stream)

    def abort(self) -> None:
        """In a thread of its own: it waits for the GPU and for NCCL's threads, and steps must go on."""
        threading.Thread(target=self._abort, name="nccl-abort", daemon=True).start()

    def _abort(self) -> None:
        with torch.cuda.device(self._copies.device):
            try:
                self._communicator.abort()
            except RuntimeError as error:
                log.warning("nccl abort", extra={"error": str(error)})

    def _begin(self, call: Any, slot: int, size: int) -> None:
        try:
            call(self._ring[slot][:size], self._peer, stream=self._stream.cuda_stream)
        except RuntimeError as error:
            raise TransportUnavailable(f"nccl: {error}") from error


class StreamMark:
    """Satisfies ``Mark``."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def is_done(self) -> bool:
        return self._event.query()


def nccl_communicators(copies: CudaCopies) -> NcclCommunicators | None:
    """None where nccl4py, or the NCCL that it needs, is not installed."""
    try:
        core = importlib.import_module("nccl.core")  # optional: the extra `cuda`
        if core.get_version().libnccl is None:
            return None
    except (ImportError, RuntimeError, OSError) as error:
        log.info("no NCCL", extra={"error": str(error)})
        return None
    return NcclCommunicators(core, copies)
