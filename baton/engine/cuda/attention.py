"""Paged attention on the GPU: which kernel computes which shape, and decode, one query row per sequence.

``baton.engine.cuda.prefill_attention`` is the other half. Both write into buffers that exist already and run on torch's
current stream. A step's tables are uploaded by the caller; ``plan`` only decides how the work is cut up, from the same
tables on the host, and must come before the step's first ``run``. All of one engine's attention shares one workspace,
so it must stay on one stream.

A window may be the model's, or a request's own (``serves_windows``): then rows with windows and without share a step.
What a window hides is left out of a row's page table, block by block, so kernels never read it.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.cuda.attention_shape import AttentionShape, PageTable, first_rows
from baton.engine.cuda.decode_kernel import SplitDecode
from baton.engine.cuda.flashinfer_decode import CudaCoreSchedule, PlannedDecode, TensorCoreSchedule
from baton.engine.cuda.flashinfer_kernels import Kernel
from baton.engine.cuda.library import CudaLibrary

Ints = NDArray[np.int32]

WORKSPACE_BYTES = 256 << 20


class DecodeBackend(Enum):
    """What computes decode attention."""

    SPLIT = "split"  # our own kernel: no plan at all
    CUDA_CORES = "cuda_cores"
    TENSOR_CORES = "tensor_cores"


def allocate_workspace(device: torch.device) -> torch.Tensor:
    """Scratch memory, uint8 [WORKSPACE_BYTES], that all attention of one engine shares. Graphs keep its address."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def decode_backend(shape: AttentionShape) -> DecodeBackend:
    """The backend for decode batches of this shape.

    Our own kernel wherever it is compiled: it balances bytes over the multiprocessors whatever the lengths, in one
    launch and without a plan. Head size 256, more than eight query heads per KV head and small blocks are FlashInfer's:
    its CUDA-core kernel for one or two heads, its tensor-core kernel for more, and where it can skip behind a window.
    """
    if SplitDecode.supports(shape):
        return DecodeBackend.SPLIT
    if shape.window is None and shape.group <= 2:
        return DecodeBackend.CUDA_CORES
    return DecodeBackend.TENSOR_CORES


def decode_kernels(backend: DecodeBackend) -> set[Kernel]:
    """FlashInfer kernels that ``backend`` needs, for compiling ahead of time."""
    return {
        DecodeBackend.SPLIT: set[Kernel](),
        DecodeBackend.CUDA_CORES: {Kernel.CUDA_CORES},
        DecodeBackend.TENSOR_CORES: {Kernel.FA2},
    }[backend]


def serves_windows(shape: AttentionShape) -> bool:
    """Whether each row of a decode batch may have a window of its own: only our own kernel does that."""
    return decode_backend(shape) is DecodeBackend.SPLIT


def takes_empty_rows(shape: AttentionShape) -> bool:
    """Whether the last rows of a decode batch may have no block at all; what comes out of those is left as it was.

    Only our own kernel does that, and is much faster for it: the few tokens of padding rows all fall to one share.
    """
    return decode_backend(shape) is DecodeBackend.SPLIT


def prefill_kernel(shape: AttentionShape) -> Kernel:
    """fa3 (530 TFLOP/s at 8192 tokens, fa2: 308); with an FP8 pool its FP8 form, which takes q in e4m3.

    That form has no windows: of the tiles at a window's edge it loads, but never takes in, those it should mask.
    """
    if shape.kv_dtype == torch.bfloat16:
        return Kernel.FA3
    return Kernel.FA3_FP8 if shape.window is None else Kernel.FA2


def engine_kernels(shape: AttentionShape) -> list[tuple[AttentionShape, Kernel]]:
    """All FlashInfer kernels that an engine of this shape loads, for ``compile_kernels``."""
    prefill = [shape, shape.windowed] if shape.window is None and serves_windows(shape) else [shape]
    decode = [(shape, kernel) for kernel in decode_kernels(decode_backend(shape))]
    return [*decode, *((each, prefill_kernel(each)) for each in prefill)]


class DecodeAttention:
    """Attention of the last token of each of ``rows`` sequences; made once per captured batch size.

    A captured ``run`` keeps the addresses of ``pool``, ``table``, ``workspace``, q, out and of buffers in this object,
    which must outlive the graph. Rows that pad the batch have no block (``takes_empty_rows``) or read a dummy one, one
    token long.
    """

    def __init__(
        self,
        shape: AttentionShape,
        rows: int,
        pool: torch.Tensor,
        table: PageTable[torch.Tensor],
        workspace: torch.Tensor,
        library: CudaLibrary,
        backend: DecodeBackend | None = None,
    ) -> None:
        """``table`` may be longer than ``rows``; ``backend`` overrides ``decode_backend(shape)``.

        Raises CudaUnavailable, ConfigError for a backend that does not do the shape, ValueError for another pool.
        """
        self.shape = shape
        self.rows = rows
        self.backend = decode_backend(shape) if backend is None else backend
        self._heads = (shape.heads, shape.head_dim)
        pages = first_rows(table, rows)
        if self.backend is DecodeBackend.SPLIT:
            self._kernel = SplitDecode(shape, rows, pool, pages, workspace, library)
        elif self.backend is DecodeBackend.CUDA_CORES:
            self._kernel = PlannedDecode(shape, rows, pool, pages, workspace, CudaCoreSchedule(shape))
        else:
            self._kernel = PlannedDecode(shape, rows, pool, pages, workspace, TensorCoreSchedule(shape))

    def plan(self, indptr: Ints) -> None:
        """Cut up the work of the next step. ``indptr`` is the host's copy, int32 [rows + 1] or longer.

        Returns at once when the last plan still serves; otherwise queues one small copy on the current stream.
        """
        self._kernel.plan(indptr[: self.rows + 1])

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """bf16 ``q`` [rows, heads * head_dim] (rows may be strided: a slice of the fused qkv) to ``out``, contiguous.

        The KV of the rows' own tokens must be in the pool already.
        """
        self._kernel.run(layer, q.unflatten(1, self._heads), out.view(self.rows, *self._heads))
