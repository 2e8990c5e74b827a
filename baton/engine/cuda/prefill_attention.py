"""Prefill attention on the GPU: packed chunks of query rows whose keys and values are in the pool already.

FlashInfer's kernels take one window a launch, so a step's chunks come in groups that see equally far: one plan and one
launch a layer for each. Groups lie behind each other in the packed rows, and so do their plans in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baton.core.errors import ConfigError
from baton.engine.cuda.attention import prefill_kernel
from baton.engine.cuda.attention_shape import AttentionShape, ChunkTable, KvScale, window_left
from baton.engine.cuda.decode_kernel import QueryQuantizer
from baton.engine.cuda.flashinfer_kernels import CAUSAL, HND, Kernel, load_kernel
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.plan_staging import PlanStaging

Ints = NDArray[np.int32]

_PLAN_BYTES = 8 << 20  # fa3 lists every (tile, head); past 4,096 tiles one list serves all heads
_ALIGNMENT = 256  # bytes: where a plan may begin
_KERNELS = {
    torch.bfloat16: (Kernel.FA2, Kernel.FA3),
    torch.float8_e4m3fn: (Kernel.FA2, Kernel.FA3_FP8),
}


class PrefillAttention:
    """Causal attention of packed chunks. Runs eagerly, not in graphs."""

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
        self._kernel = kernel
        self._views = shape.layer_views(pool)
        self._workspace = workspace
        self._integers = torch.zeros(_PLAN_BYTES, dtype=torch.uint8, device=pool.device)
        self._staging = PlanStaging(_PLAN_BYTES)
        self._heads = (shape.heads, shape.head_dim)
        self._q8 = torch.zeros(0, dtype=torch.float8_e4m3fn, device=pool.device)
        if self._as_the_model.takes_fp8_queries:
            self._quantizer = QueryQuantizer(library, pool.device)
            self._q8 = self._q8.new_zeros(max_rows, shape.heads * shape.head_dim)
        self._groups: list[_Group] = []

    def plan(self, host: Sequence[ChunkTable[Ints]], device: Sequence[ChunkTable[torch.Tensor]]) -> None:
        """Cut up the work of the next step, from the exact tables on the host; ``device`` holds, or will hold when
        the step runs, the same values (its arrays may be longer). The groups' rows follow each other."""
        self._groups.clear()
        first, used = 0, 0
        with self._staging.lend() as pinned:
            for wanted, table in zip(host, device, strict=True):
                module = self._as_the_model if wanted.window is None else self._windowed
                left = self.shape.window_left if wanted.window is None else window_left(wanted.window)
                integers = self._integers[used:]
                info = module.plan(self._workspace, integers, pinned[used:], wanted, left)
                last = first + int(wanted.starts[-1])
                self._groups.append(_Group(module, slice(first, last), left, integers, info, table))
                first, used = last, -(-(used + module.plan_bytes(info)) // _ALIGNMENT) * _ALIGNMENT

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """bf16 ``q`` [rows, heads * head_dim] (rows may be strided) to ``out``, contiguous; rows as planned."""
        scale = self.shape.kv_scale(layer)
        for group in self._groups:
            module, rows, chunks = group.module, group.rows, group.table.chunks
            queries, results = q[rows], out[rows]
            if module.takes_fp8_queries:
                self._quantizer.quantize(queries, self._q8[rows])
                queries = self._q8[rows]
            pages = group.table.pages
            module.run(
                (self._workspace, group.integers, group.info),
                (queries.unflatten(1, self._heads), *self._views[layer]),
                (group.table.starts, pages.indptr[: chunks + 1], pages.indices, pages.last_page[:chunks]),
                results.view(-1, *self._heads),
                group.window_left,
                scale,
            )

    @cached_property
    def _as_the_model(self) -> _Module:
        """For chunks that see all tokens before them, or as far as the model's own window goes."""
        return _Module(self.shape, self._kernel or prefill_kernel(self.shape))

    @cached_property
    def _windowed(self) -> _Module:
        """For windows of any width."""
        shape = self.shape.windowed
        return self._as_the_model if shape == self.shape else _Module(shape, self._kernel or prefill_kernel(shape))


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks that are launched together: ``rows`` of the step's packed ones, and what their launch takes."""

    module: _Module
    rows: slice
    window_left: int
    integers: torch.Tensor
    info: Any
    table: ChunkTable[torch.Tensor]


class _Module:
    """One compiled kernel, with the arguments that it takes."""

    def __init__(self, shape: AttentionShape, kernel: Kernel) -> None:
        if kernel not in _KERNELS[shape.kv_dtype]:
            raise ConfigError(f"attention: {kernel.value} cannot read a pool of {shape.kv_dtype}")
        if kernel is Kernel.FA3_FP8 and shape.window is not None:
            raise ConfigError(f"attention: {kernel.value} has no windows")
        self._shape = shape
        self._kernel = kernel
        self._module = load_kernel(shape, kernel)
        self.takes_fp8_queries = kernel is Kernel.FA3_FP8

    def plan(
        self, workspace: torch.Tensor, integers: torch.Tensor, pinned: torch.Tensor, table: ChunkTable[Ints], left: int
    ) -> Any:
        """What the launches of ``table`` take; their lists go to ``integers`` by way of ``pinned``."""
        shape, pages = self._shape, table.pages
        lengths = (np.diff(pages.indptr) - 1) * shape.block_size + pages.last_page
        arguments: list[Any] = [
            torch.from_numpy(table.starts),
            torch.from_numpy(pages.indptr),
            torch.from_numpy(lengths.astype(np.int32, copy=False)),
            int(table.starts[-1]),
            table.chunks,
            shape.heads,
            shape.kv_heads,
            shape.block_size,
            False,  # not for a graph
            shape.head_dim,
            shape.head_dim,
            True,  # causal
            left,
        ]
        if self._kernel is Kernel.FA2:
            arguments += [-1, False, 0]  # no fixed split size, splitting allowed, no CTAs of other kernels
        return self._module.plan(workspace, integers, pinned, *arguments)

    def plan_bytes(self, info: Any) -> int:
        """How much of its memory a plan takes, from where the last of its lists begins and how long that one is."""
        if self._kernel is not Kernel.FA2:
            return int(info[7]) + int(info[1]) - int(info[0])  # seven lists are equally long; the second follows one
        works, is_split = int(info[0]), bool(info[14])
        return int(info[12]) + works if is_split else int(info[9]) + np.dtype(np.int32).itemsize

    def run(
        self,
        planned: tuple[Any, ...],
        operands: tuple[torch.Tensor, ...],
        tables: tuple[torch.Tensor, ...],
        out: torch.Tensor,
        left: int,
        scale: KvScale,
    ) -> None:
        """``planned`` are workspace, lists and info of a plan, ``operands`` q, K and V, ``tables`` starts and pages."""
        self._module.paged_run(
            *planned,
            *operands,
            *tables,
            out,
            None,  # no log-sum-exp wanted
            CAUSAL,
            HND,
            left,
            False,  # no launch before the predecessor ends: eager steps gain nothing
            *self._variant_arguments(scale.k, scale.v),
        )
        if self._kernel is Kernel.FA2 and scale.v != 1.0:
            out.mul_(scale.v)

    def _variant_arguments(self, k_scale: float, v_scale: float) -> tuple[Any, ...]:
        """What each kernel takes after the common arguments; None stands for masks and tables that we do not use."""
        scale, no_soft_cap = self._shape.scale, 0.0
        if self._kernel is Kernel.FA3_FP8:
            return None, None, None, scale, 1.0, k_scale, v_scale
        if self._kernel is Kernel.FA3:
            return None, None, None, None, no_soft_cap, scale, 1.0, 0
        return *(None,) * 8, no_soft_cap, scale * k_scale, 1.0, 1.0, 0
