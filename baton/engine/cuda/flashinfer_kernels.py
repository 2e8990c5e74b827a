"""FlashInfer's attention kernels, compiled at first use and called without its Python wrappers.

The compiled modules take the same arguments in the same order as the wrappers of flashinfer 0.6.13 pass them; the
wrappers cost a millisecond of host time per plan at batch 256, the modules some tens of microseconds.

FlashInfer keeps compiled kernels under $FLASHINFER_WORKSPACE_BASE/.cache/flashinfer, read when it is first imported:
whoever starts the process sets the variable. It needs nvcc, ninja and a C++ compiler for what the cache lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from baton.engine.cuda.attention_shape import AttentionShape
from baton.engine.cuda.build import CudaUnavailable

VERSION = "0.6.13"  # whose modules' arguments these are; others differ in order and number
HND = 1  # the layout code of [blocks, kv_heads, block_size, head_dim]
NON_CAUSAL, CAUSAL = 0, 1
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)  # query heads per KV head that the CUDA-core kernel is compiled for


class Kernel(Enum):
    """A compiled module. fa2 and fa3 are FlashInfer's names for its tensor-core kernels for Ampere and for Hopper."""

    CUDA_CORES = "cuda_cores"
    FA2 = "fa2"
    FA3 = "fa3"
    FA3_FP8 = "fa3_fp8"  # q, K and V in e4m3


def compile_kernels(wanted: Collection[tuple[AttentionShape, Kernel]]) -> None:
    """Compile ahead of time, all at once, what ``load_kernel`` would compile at first use.

    Takes a minute or two when the cache is empty. Raises CudaUnavailable as ``load_kernel`` does.
    """
    if not wanted:
        return
    with _unavailable_without_flashinfer():
        from flashinfer.jit.core import build_jit_specs  # pyright: ignore[reportMissingImports]

        specifications = [_specification(shape, kernel) for shape, kernel in wanted]
        build_jit_specs([each for each in specifications if not each.jit_library_path.exists()])


def load_kernel(shape: AttentionShape, kernel: Kernel) -> Any:
    """The module with the functions ``plan`` and ``run`` (CUDA_CORES) or ``paged_run`` (the others).

    Raises CudaUnavailable when flashinfer is not installed or cannot compile.
    """
    with _unavailable_without_flashinfer():
        specification = _specification(shape, kernel)
        return _load_compiled(specification) or specification.build_and_load()


def _load_compiled(specification: Any) -> Any:
    """The module from the cache, None when it is not there or was left unfinished by a process that was killed.

    FlashInfer would ask ninja, which compiles anew for minutes whenever the package was installed after the cache was
    filled. The cache is kept by FlashInfer's version and the GPU's architecture, and a module's name says the rest.
    """
    from filelock import FileLock

    with FileLock(specification.lock_path, thread_local=False):
        if not specification.jit_library_path.exists():
            return None
        try:
            return specification.load(specification.jit_library_path)
        except (OSError, RuntimeError):
            return None


def _specification(shape: AttentionShape, kernel: Kernel) -> Any:
    from flashinfer import __version__  # pyright: ignore[reportMissingImports]

    if __version__ != VERSION:
        raise CudaUnavailable(f"flashinfer-python: must be {VERSION}, got {__version__}")
    from flashinfer.jit.attention import (  # pyright: ignore[reportMissingImports]
        gen_batch_decode_module,
        gen_batch_prefill_module,
    )

    q_dtype = torch.float8_e4m3fn if kernel is Kernel.FA3_FP8 else torch.bfloat16
    dtypes = (q_dtype, shape.kv_dtype, torch.bfloat16, torch.int32)
    no_position_encoding, no_soft_cap, no_half_reduction = 0, False, False
    traits = (shape.head_dim, shape.head_dim, no_position_encoding, shape.window is not None, no_soft_cap)
    if kernel is Kernel.CUDA_CORES:
        return gen_batch_decode_module(*dtypes, *traits)
    backend = "fa2" if kernel is Kernel.FA2 else "fa3"
    return gen_batch_prefill_module(backend, *dtypes, *traits, no_half_reduction)


@contextmanager
def _unavailable_without_flashinfer() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise CudaUnavailable(f"FlashInfer: cannot be imported (install baton[cuda]): {error}") from error
    except (OSError, RuntimeError) as error:
        raise CudaUnavailable(f"FlashInfer: cannot compile or load its kernels: {error}") from error
