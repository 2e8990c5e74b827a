"""Device memory mapped into other processes of the host (``src/ipc.cpp``)."""

from __future__ import annotations

from ctypes import byref, c_size_t, c_void_p, create_string_buffer

import torch

from baton.core.errors import TransportUnavailable
from baton.core.types import DevicePool
from baton.engine.cuda.library import CudaFailed, CudaLibrary

HANDLE_BYTES = 64


class DeviceIpc:
    def __init__(self, library: CudaLibrary, device: torch.device) -> None:
        self._device = torch.cuda.get_device_properties(device)
        self._export = library.declare("baton_ipc_export", (c_void_p, c_void_p, c_void_p))
        self._open = library.declare("baton_ipc_open", (c_void_p, c_void_p))
        self._close = library.declare("baton_ipc_close", (c_void_p,))

    def export(self, tensor: torch.Tensor) -> DevicePool:
        """Raises CudaFailed for memory that cannot be exported (expandable segments, a driver without IPC)."""
        handle, offset = create_string_buffer(HANDLE_BYTES), c_size_t()
        self._export(tensor.data_ptr(), handle, byref(offset))
        return DevicePool(handle.raw, offset.value, tensor.nbytes, str(self._device.uuid))

    def open(self, pool: DevicePool) -> MappedMemory:
        """TransportUnavailable when this process cannot map it: another host, no peer access, or its own memory."""
        if len(pool.handle) != HANDLE_BYTES:
            raise TransportUnavailable(f"cuda-ipc: the handle has {len(pool.handle)} bytes")
        base = c_void_p()
        try:
            self._open(pool.handle, byref(base))
        except CudaFailed as error:
            raise TransportUnavailable(f"cuda-ipc: the pool cannot be mapped: {error.message}") from error
        assert base.value is not None
        return MappedMemory(base.value, pool.offset, self._close)


class MappedMemory:
    """Another process's memory. Its owner's death does not end it; what it takes is free when it is closed."""

    def __init__(self, base: int, offset: int, close: object) -> None:
        self._base = base
        self._close = close
        self.address = base + offset

    def close(self) -> None:
        assert callable(self._close)
        self._close(self._base)
