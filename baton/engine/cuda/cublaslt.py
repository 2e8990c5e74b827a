"""cublasLt (``src/cublaslt.cpp``): products of any number of rows, with the algorithm chosen by the caller."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint64, c_void_p
from enum import IntEnum
from types import TracebackType

import torch

from baton.engine.cuda.library import CudaFailed, CudaLibrary, stream_lookup

WORKSPACE_BYTES = 64 << 20
_ALGORITHM_BYTES = 64


class Kind(IntEnum):
    """The operands' type; results are bf16. E4M3 operands come with a float32 scale for every row."""

    BF16 = 0
    E4M3 = 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self is Kind.BF16 else torch.float8_e4m3fn


class CublasLt:
    """One cublasLt handle with its workspace. A context manager; products queue on torch's current stream."""

    def __init__(self, library: CudaLibrary, device: torch.device) -> None:
        """Raises CudaUnavailable when ``device`` is no GPU or ``library`` lacks a function."""
        self._stream = stream_lookup(device)
        pointer, c_plan = ctypes.POINTER, c_void_p
        self._matmul = library.declare(
            "baton_lt_matmul", (c_plan, c_void_p, c_int, *(c_void_p,) * 7, c_uint64, c_void_p)
        )
        self._candidates = library.declare(
            "baton_lt_candidates", (c_plan, c_int, c_uint64, c_void_p, c_int, c_void_p, pointer(c_int))
        )
        self._need = library.declare("baton_lt_workspace", (c_plan, c_int, c_void_p, c_void_p, pointer(c_uint64)))
        self._describe = library.declare("baton_lt_plan", (c_void_p, *(c_int,) * 4, pointer(c_void_p)))
        self._forget = library.declare("baton_lt_forget", (c_plan,))
        self._destroy = library.declare("baton_lt_destroy", (c_void_p,))
        self._plans: dict[tuple[Kind, int, int, bool], int] = {}
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._workspace_address = self._workspace.data_ptr()
        handle, version = c_void_p(), c_uint64()
        with torch.cuda.device(device):
            library.declare("baton_lt_create", (pointer(c_void_p), pointer(c_uint64)))(
                ctypes.byref(handle), ctypes.byref(version)
            )
        self._handle = handle
        self.version = version.value

    def __enter__(self) -> CublasLt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the handle and the plans back. Nothing that uses them may be queued or captured any more."""
        for plan in self._plans.values():
            self._forget(plan)
        self._plans.clear()
        if self._handle:
            self._destroy(self._handle)
            self._handle = c_void_p()

    def plan(self, kind: Kind, n: int, k: int, bias: bool) -> int:
        """The plan of all products of this kind with weights [n, k]; lives as long as this object."""
        key = (kind, n, k, bias)
        if key not in self._plans:
            plan = c_void_p()
            self._describe(self._handle, kind, n, k, bias, ctypes.byref(plan))
            assert plan.value is not None
            self._plans[key] = plan.value
        return self._plans[key]

    def candidates(self, plan: int, rows: int, limit: int) -> list[bytes]:
        """At most ``limit`` algorithms for ``rows`` rows, the most promising first; none where cublasLt has none."""
        algorithms, count = ctypes.create_string_buffer(limit * _ALGORITHM_BYTES), c_int()
        try:
            self._candidates(
                plan, rows, WORKSPACE_BYTES, self._workspace_address, limit, algorithms, ctypes.byref(count)
            )
        except CudaFailed:
            return []
        starts = range(0, count.value * _ALGORITHM_BYTES, _ALGORITHM_BYTES)
        return [algorithms.raw[start : start + _ALGORITHM_BYTES] for start in starts]

    def accepts(self, plan: int, rows: int, algorithm: bytes) -> bool:
        """Whether ``algorithm`` can compute ``rows`` rows in the workspace."""
        need = c_uint64()
        try:
            self._need(plan, rows, self._workspace_address, algorithm, ctypes.byref(need))
        except CudaFailed:
            return False
        return need.value <= WORKSPACE_BYTES

    def run(
        self,
        plan: int,
        algorithm: bytes | None,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
    ) -> None:
        """out [M, N] = x [M, K] @ weight [N, K]^T + bias [N]; ``x_scale`` [M] and ``weight_scale`` [N] with E4M3.

        Without ``algorithm`` cublasLt takes its own choice. The bias is added in float32. Raises CudaFailed when the
        algorithm does not suit.
        """
        self._matmul(
            plan,
            algorithm,
            x.shape[0],
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if x_scale is None else x_scale.data_ptr(),
            None if weight_scale is None else weight_scale.data_ptr(),
            self._workspace_address,
            WORKSPACE_BYTES,
            self._stream(),
        )
