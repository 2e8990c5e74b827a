"""Pairs of communicators between the GPUs of two engines, by NCCL (``nccl4py``): ``Communicators`` for real.

A communicator is made without blocking, so joining, sending and receiving all go through "in progress", which has to be
over before anything else is begun on it or on its stream. Nothing is shared between pairs: when one breaks it is
aborted alone. NVLink multicast is left off (``NCCL_NVLS_ENABLE=0``, set where the engine's process begins).
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Nccl:
    """nccl4py, and what it raises: its errors have no ancestor in common."""

    core: ModuleType
    errors: tuple[type[Exception], ...]

    @contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        """Turns what NCCL raises into TransportUnavailable."""
        try:
            yield
        except self.errors as error:
            raise TransportUnavailable(f"nccl: {doing}: {error}") from error


class NcclCommunicators:
    """Satisfies ``Communicators``. Made by ``nccl_communicators``."""

    def __init__(self, nccl: Nccl, copies: CudaCopies) -> None:
        self._nccl = nccl
        self._copies = copies

    def invite(self) -> bytes:
        with self._nccl.translated("invite"):
            return bytes(self._nccl.core.get_unique_id())

    def join(self, invitation: bytes, rank: int) -> NcclCommunicator:
        core = self._nccl.core
        with self._nccl.translated("join"):
            ring = torch.empty(SLOTS, SLOT_BYTES, dtype=torch.uint8, device=self._copies.device)
            invited, config = core.UniqueId.from_bytes(invitation), core.NCCLConfig(blocking=False)
            communicator = core.Communicator.init(2, rank, invited, config)
        return NcclCommunicator(self._nccl, communicator, 1 - rank, ring, self._copies)


class NcclCommunicator:
    """Satisfies ``Communicator``."""

    slots = SLOTS
    slot_bytes = SLOT_BYTES

    def __init__(self, nccl: Nccl, communicator: Any, peer: int, ring: torch.Tensor, copies: CudaCopies) -> None:
        """``ring`` uint8 [slots, slot_bytes] on the device."""
        self._nccl = nccl
        self._communicator = communicator
        self._peer = peer
        self._copies = copies
        self._stream = torch.cuda.Stream(copies.device, priority=_URGENT)
        self._ring = ring

    def is_settled(self) -> bool:
        with self._nccl.translated("watch"):
            state = int(self._communicator.get_async_error())
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
        with self._nccl.translated("send"):
            self._communicator.send(self._ring[slot][:size], self._peer, stream=self._stream.cuda_stream)

    def receive(self, slot: int, size: int) -> None:
        with self._nccl.translated("receive"):
            self._communicator.recv(self._ring[slot][:size], self._peer, stream=self._stream.cuda_stream)

    def mark(self) -> StreamMark:
        return StreamMark(self._stream)

    def abort(self) -> None:
        """In a thread of its own: it waits for the GPU and for NCCL's threads, and steps must go on."""
        threading.Thread(target=self._abort, name="nccl-abort", daemon=True).start()

    def _abort(self) -> None:
        with torch.cuda.device(self._copies.device):
            try:
                self._communicator.abort()
            except self._nccl.errors as error:
                log.warning("nccl abort", extra={"error": str(error)})


class StreamMark:
    """Satisfies ``Mark``."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def is_done(self) -> bool:
        return self._event.query()


def nccl_communicators(copies: CudaCopies) -> NcclCommunicators | None:
    """None where nccl4py, or the NCCL that it needs, is not installed."""
    nccl = load_nccl()
    return None if nccl is None else NcclCommunicators(nccl, copies)


def load_nccl() -> Nccl | None:
    """nccl4py is optional: it comes with the extra `cuda`."""
    try:
        core = importlib.import_module("nccl.core")
        failed = importlib.import_module("nccl.bindings.nccl").NCCLError
        if core.get_version().libnccl is None:
            return None
    except (ImportError, RuntimeError, OSError) as error:
        log.info("no NCCL", extra={"error": str(error)})
        return None
    return Nccl(core, (failed, core.NcclInvalid, RuntimeError, ValueError))
