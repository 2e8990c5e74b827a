"""Paged attention on the GPU: one query row per sequence (decode), and packed chunks of rows (prefill).

Both write into buffers that exist already and run on torch's current stream. A step's tables are uploaded by the
caller; ``plan`` only decides how the work is cut up, from the same tables on the host, and must come before the
step's first ``run``. All of one engine's attention shares one workspace, so it must stay on one stream.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baton.core.errors import ConfigError
from baton.engine.cuda.attention_shape import AttentionShape, ChunkTable, PageTable, first_rows
from baton.engine.cuda.decode_kernel import QueryQuantizer, SplitDecode
from baton.engine.cuda.flashinfer_decode import CudaCoreSchedule, PlannedDecode, TensorCoreSchedule
from baton.engine.cuda.flashinfer_kernels import CAUSAL, HND, Kernel, load_kernel
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.plan_staging import PlanStaging

Ints = NDArray[np.int32]

WORKSPACE_BYTES = 256 << 20
_PREFILL_PLAN_BYTES = 8 << 20  # fa3 lists every (tile, head); past 4,096 tiles one list serves all heads
_PREFILL_KERNELS = {
    torch.bfloat16: (Kernel.FA2, Kernel.FA3),
    torch.float8_e4m3fn: (Kernel.FA2, Kernel.FA3_FP8),
}


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


def prefill_kernel(shape: AttentionShape) -> Kernel:
    """fa3 (530 TFLOP/s at 8192 tokens, fa2: 308); with an FP8 pool its FP8 form, which takes q in e4m3."""
    return Kernel.FA3 if shape.kv_dtype == torch.bfloat16 else Kernel.FA3_FP8


def engine_kernels(shape: AttentionShape) -> set[Kernel]:
    """All FlashInfer kernels that an engine of this shape loads, for ``compile_kernels``."""
    return decode_kernels(decode_backend(shape)) | {prefill_kernel(shape)}


class DecodeAttention:
    """Attention of the last token of each of ``rows`` sequences; made once per captured batch size.

    A captured ``run`` keeps the addresses of ``pool``, ``table``, ``workspace``, q, out and of buffers in this object,
    which must outlive the graph. Rows that pad the batch read a dummy block, one token long.
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


class PrefillAttention:
    """Causal attention of packed chunks whose keys and values are in the pool already. Runs eagerly, not in graphs."""

    def __init__(
        self,
        shape: AttentionShape,
        max_rows: int,
        pool: torch.Tensor,
        workspace: torch.Tensor,
        library: CudaLibrary,
        kernel: Kernel | None = None,
    ) -> None:
        """``max_rows`` bounds the query rows of a step; ``kernel`` overrides ``prefill_kernel(shape)``.

        Raises CudaUnavailable, ConfigError for a kernel that does not read the pool, ValueError for another pool.
        """
        self.shape = shape
        self._kernel = prefill_kernel(shape) if kernel is None else kernel
        if self._kernel not in _PREFILL_KERNELS[shape.kv_dtype]:
            raise ConfigError(f"attention: {self._kernel.value} cannot read a pool of {shape.kv_dtype}")
        self._module = load_kernel(shape, self._kernel)
        self._views = shape.layer_views(pool)
        self._workspace = workspace
        self._integers = torch.zeros(_PREFILL_PLAN_BYTES, dtype=torch.uint8, device=pool.device)
        self._staging = PlanStaging(_PREFILL_PLAN_BYTES)
        self._heads = (shape.heads, shape.head_dim)
        self._q8 = torch.zeros(0, dtype=torch.float8_e4m3fn, device=pool.device)
        if self._kernel is Kernel.FA3_FP8:
            self._quantizer = QueryQuantizer(library, pool.device)
            self._q8 = self._q8.new_zeros(max_rows, shape.heads * shape.head_dim)
        self._tables: tuple[torch.Tensor, ...] = ()
        self._plan: Any = None

    def plan(self, host: ChunkTable[Ints], device: ChunkTable[torch.Tensor]) -> None:
        """Cut up the work of the next step, from the exact tables on the host; ``device`` holds, or will hold when
        the step runs, the same values (its arrays may be longer)."""
        shape, chunks = self.shape, len(host.starts) - 1
        pages = host.pages
        lengths = (np.diff(pages.indptr) - 1) * shape.block_size + pages.last_page
        arguments: list[Any] = [
            torch.from_numpy(host.starts),
            torch.from_numpy(pages.indptr),
            torch.from_numpy(lengths.astype(np.int32, copy=False)),
            int(host.starts[-1]),
            chunks,
            shape.heads,
            shape.kv_heads,
            shape.block_size,
            False,  # not for a graph
            shape.head_dim,
            shape.head_dim,
            True,  # causal
            shape.window_left,
        ]
        if self._kernel is Kernel.FA2:
            arguments += [-1, False, 0]  # no fixed split size, splitting allowed, no CTAs of other kernels
        with self._staging.lend() as pinned:
            self._plan = self._module.plan(self._workspace, self._integers, pinned, *arguments)
        table = first_rows(device.pages, chunks)
        self._tables = (device.starts[: chunks + 1], table.indptr, table.indices, table.last_page)

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """bf16 ``q`` [rows, heads * head_dim] (rows may be strided) to ``out``, contiguous; rows as planned."""
        rows = q.shape[0]
        k, v = self._views[layer]
        scale = self.shape.kv_scale(layer)
        if self._kernel is Kernel.FA3_FP8:
            self._quantizer.quantize(q, self._q8[:rows])
            q = self._q8[:rows]
        self._module.paged_run(
            self._workspace,
            self._integers,
            self._plan,
            q.unflatten(1, self._heads),
            k,
            v,
            *self._tables,
            out.view(rows, *self._heads),
            None,  # no log-sum-exp wanted
            CAUSAL,
            HND,
            self.shape.window_left,
            False,  # no launch before the predecessor ends: eager steps gain nothing
            *self._variant_arguments(scale.k, scale.v),
        )
        if self._kernel is Kernel.FA2 and scale.v != 1.0:
            out.mul_(scale.v)

    def _variant_arguments(self, k_scale: float, v_scale: float) -> tuple[Any, ...]:
        """What each kernel takes after the common arguments; None stands for masks and tables that we do not use."""
        scale, no_soft_cap = self.shape.scale, 0.0
        if self._kernel is Kernel.FA3_FP8:
            return None, None, None, scale, 1.0, k_scale, v_scale
        if self._kernel is Kernel.FA3:
            return None, None, None, None, no_soft_cap, scale, 1.0, 0
        return *(None,) * 8, no_soft_cap, scale * k_scale, 1.0, 1.0, 0
