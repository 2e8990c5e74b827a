"""Loads the compiled kernels and gives out their functions, with argument types declared and return codes checked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from baton.core.errors import BatonError
from baton.engine.cuda.build import CudaUnavailable


class CudaFailed(BatonError):
    """A CUDA call failed: a launch the device refused, or an earlier fault that surfaces now."""

    reason = "CUDA_FAILED"


class CudaLibrary:
    """One loaded library. Every module that calls into it declares the functions it needs, once, when it is built.

    Calls keep the GIL: a launch takes microseconds, and handing the GIL over would take longer than that.
    """

    def __init__(self, path: Path) -> None:
        """Raises CudaUnavailable when ``path`` cannot be loaded."""
        try:
            self._library = ctypes.PyDLL(str(path))
        except OSError as error:
            raise CudaUnavailable(f"CUDA kernels: cannot load {path}: {error}") from error
        self._error_name = self._library.baton_error_name
        self._error_name.argtypes = (ctypes.c_int,)
        self._error_name.restype = ctypes.c_char_p

    def declare(self, name: str, argtypes: Sequence[Any]) -> Callable[..., int]:
        """The C function ``name``, which takes ``argtypes`` and returns a cudaError_t, or a negated cublasStatus_t.

        A call raises CudaFailed unless the function returns 0. Raises CudaUnavailable when the library lacks it.
        """
        try:
            function = self._library[name]
        except AttributeError as error:
            raise CudaUnavailable(f"CUDA kernels: the library has no function {name}") from error
        function.argtypes = tuple(argtypes)
        function.restype = ctypes.c_int
        function.errcheck = self._check
        return function

    def _check(self, code: Any, function: Any, arguments: tuple[Any, ...]) -> Any:
        if code != 0:
            what = self._error_name(code).decode() if code > 0 else f"cuBLAS status {-code}"
            raise CudaFailed(f"{function.__name__}: {what}")
        return code


def stream_lookup(device: torch.device) -> Callable[[], int]:
    """A function that gives the handle (cudaStream_t) of torch's current stream on ``device``, cheaply.

    Raises CudaUnavailable when torch has no CUDA or ``device`` is not a GPU.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        raise CudaUnavailable(f"device: must be a GPU that torch can use, got {device}")
    from torch._C import _cuda_getCurrentRawStream as current_stream  # pyright: ignore[reportAttributeAccessIssue]

    index = torch.cuda.current_device() if device.index is None else device.index
    return lambda: current_stream(index)
