"""KV blocks copied and digested on a stream of their own, beside the steps: ``DeviceCopies`` on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from ctypes import c_size_t, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray

from baton.core.errors import TransferRejected
from baton.core.types import DevicePool, KvFormat
from baton.engine.cuda.block_copy import BlockCopier, CopyTable, HostTable
from baton.engine.cuda.build import CudaUnavailable
from baton.engine.cuda.ipc import DeviceIpc, MappedMemory
from baton.engine.cuda.library import CudaFailed, CudaLibrary
from baton.engine.device_copies import Communicators, PoolMapping, Span
from baton.engine.digest import DIGEST_BYTES
from baton.engine.runner import no_look

log = logging.getLogger(__name__)

MAX_BLOCKS = 16_384  # of one copy
LEAST_BLOCKS = 1024  # that a slot has room for
LOCAL_CTAS_PER_SM = 3  # inside one GPU: as many as fit
PEER_CTAS = 48  # over NVLink: 1.5 MiB in flight, more than it holds; the other SMs are left to the model
_URGENT = -1


class CudaCopies:
    """Satisfies ``DeviceCopies``. Called from the engine's thread only."""

    def __init__(
        self,
        library: CudaLibrary,
        pool: torch.Tensor,
        layout: KvFormat,
        others: Sequence[torch.cuda.Stream],
        communicators: Callable[[CudaCopies], Communicators | None] = lambda _: None,
    ) -> None:
        """``pool`` [blocks, ...], contiguous; ``others``: the streams on which others than copies touch it.

        CudaUnavailable for a layout that the kernels do not take.
        """
        device = pool.device
        self.layout = layout
        self.copier = BlockCopier(library, layout)
        self.stream = torch.cuda.Stream(device, priority=_URGENT)
        self._stream_address = self.stream.cuda_stream
        self.local_ctas = LOCAL_CTAS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        self.peer_ctas = PEER_CTAS
        self.device = device
        self._ipc = DeviceIpc(library, device)
        self._transfer = library.declare("baton_copy", (c_void_p, c_void_p, c_size_t, c_void_p))
        self._pool = pool
        self._others = others
        self._slots: list[_Slot] = []
        self._look: Callable[[], None] = no_look
        self.pool = self._exported()
        self.communicators = communicators(self)

    @property
    def address(self) -> int:
        return self._pool.data_ptr()

    def open(self, pool: DevicePool) -> CudaMapping:
        is_local = self.pool is not None and pool.device == self.pool.device
        ctas = self.local_ctas if is_local else self.peer_ctas
        return CudaMapping(self._ipc.open(pool), pool.size // self.layout.block_bytes, ctas)

    def pull(self, blocks: Sequence[int], source: PoolMapping, source_blocks: Sequence[int], span: Span) -> CudaCopy:
        assert isinstance(source, CudaMapping)
        return self.begin(source_blocks, blocks, span, source.memory.address, self.address, source.ctas)

    def digest(self, blocks: Sequence[int], span: Span) -> CudaCopy:
        return self.begin(blocks, blocks, span, self.address, None, self.local_ctas)

    def begin(
        self,
        source_ids: Sequence[int] | None,
        target_ids: Sequence[int] | None,
        span: Span,
        source: int,
        target: int | None,
        ctas: int,
    ) -> CudaCopy:
        """Queue the table's upload, the kernel and the digests' way back; ids None: in order.

        TransferRejected for more blocks than one copy may have.
        """
        count = span.count
        if count > MAX_BLOCKS:
            raise TransferRejected(f"blocks: one copy has {MAX_BLOCKS} at most, got {count}")
        slot, stream, size = self._slot(count), self._stream_address, DIGEST_BYTES * count
        slot.host_table.write(source_ids, target_ids, span.strong)
        table = slot.device_table
        self._transfer(table.address, slot.table_address, CopyTable.bytes_for(table.room), stream)
        self.copier.launch(
            table,
            source,
            target,
            slot.device_digests_address,
            span,
            ctas,
            stream,
            from_ids=source_ids is not None,
            to_ids=target_ids is not None,
        )
        self._transfer(slot.digests_address, slot.device_digests_address, size, stream)
        slot.done.record(self.stream)
        return CudaCopy(slot, size, self._slots)

    def fence(self) -> None:
        for stream in self._others:
            stream.wait_stream(self.stream)

    def while_waiting(self, look: Callable[[], None]) -> None:
        self._look = look

    def wait(self, event: torch.cuda.Event) -> None:
        """Until ``event`` has passed; meanwhile copies begin and end."""
        while not event.query():
            self._look()

    def look(self) -> None:
        """Let copies begin and end now: for whoever keeps the host busy for long.

        What they allocate is of their own stream: memory that the caller's stream has just freed may still be in use
        there, by kernels that are queued.
        """
        with torch.cuda.stream(self.stream):
            self._look()

    def warm_up(self) -> None:
        """Load the kernels now: the driver may wait for the device when it first sees one. Block 0 becomes itself."""
        span = Span(0, self.layout.block_size, b"\1")
        for target in (self.address, None):
            copy = self.begin([0], [0], span, self.address, target, 1)
            self.stream.synchronize()
            copy.digests()

    def drain(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        self.drain()
        self._slots.clear()
        del self._pool

    def _exported(self) -> DevicePool | None:
        try:
            return self._ipc.export(self._pool)
        except CudaFailed:  # say, segments that grow: nobody can map them
            return None

    def _slot(self, count: int) -> _Slot:
        for slot in self._slots:
            if slot.room >= count:
                self._slots.remove(slot)
                return slot
        return _Slot(max(LEAST_BLOCKS, 1 << (count - 1).bit_length()), self.device)


def device_copies(
    library: CudaLibrary, pool: torch.Tensor, layout: KvFormat, others: Sequence[torch.cuda.Stream]
) -> CudaCopies | None:
    """Copies over ``pool``, with communicators where NCCL is; None for a layout that the kernels do not take."""
    from baton.engine.cuda.nccl import nccl_communicators

    try:
        copies = CudaCopies(library, pool, layout, others, nccl_communicators)
    except CudaUnavailable as error:
        log.info("KV is not copied between GPUs", extra={"error": error.message})
        return None
    copies.warm_up()
    return copies


class CudaMapping:
    """Satisfies ``PoolMapping``. ``ctas``: how many copy from it at once."""

    def __init__(self, memory: MappedMemory, blocks: int, ctas: int) -> None:
        self.memory = memory
        self.blocks = blocks
        self.ctas = ctas

    def close(self) -> None:
        self.memory.close()


class _Slot:
    """The memory that a copy of up to ``room`` blocks needs on both sides; used again when it is done."""

    def __init__(self, room: int, device: torch.device) -> None:
        self.room = room
        size = CopyTable.bytes_for(room)
        self._table = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._device_table = torch.empty(size, dtype=torch.uint8, device=device)
        self._device_digests = torch.empty(DIGEST_BYTES * room, dtype=torch.uint8, device=device)
        digests = torch.empty(DIGEST_BYTES * room, dtype=torch.uint8, pin_memory=True)
        self.digests: NDArray[np.uint8] = digests.numpy()
        self.done = torch.cuda.Event()
        # Asked for once: tensors take their time to say where they are, and a copy may wait for it.
        self.host_table = HostTable(self._table.numpy(), room)
        self.device_table = CopyTable(self._device_table.data_ptr(), room)
        self.table_address = self._table.data_ptr()
        self.digests_address = digests.data_ptr()
        self.device_digests_address = self._device_digests.data_ptr()


class CudaCopy:
    """Satisfies ``Copy``."""

    def __init__(self, slot: _Slot, size: int, slots: list[_Slot]) -> None:
        self._slot = slot
        self._size = size
        self._slots = slots

    def is_done(self) -> bool:
        return self._slot.done.query()

    def digests(self) -> bytes:
        found = self._slot.digests[: self._size].tobytes()
        self._slots.append(self._slot)
        return found
