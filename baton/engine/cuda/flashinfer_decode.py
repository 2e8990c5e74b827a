"""FlashInfer's decode kernels inside CUDA graphs, planned as seldom as correctness allows.

A plan is a list of (row, chunk) pairs and one chunk size. The kernels take the rows' lengths from the page table on the
device, so a plan stays exact as long as every row still needs as many chunks of that size as were planned. Where all
rows fill the GPU by themselves nothing is cut, and one plan serves for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from baton.core.errors import ConfigError
from baton.engine.cuda.attention_shape import AttentionShape, PageTable
from baton.engine.cuda.flashinfer_kernels import CUDA_CORE_GROUPS, HND, NON_CAUSAL, Kernel, load_kernel
from baton.engine.cuda.plan_staging import PlanStaging

Ints = NDArray[np.int32]

_PLAN_BYTES = 256 << 10  # lists of a few thousand work items at most
_ROPE_UNUSED = (1.0, 1.0)  # reciprocals of scale and theta; q and k arrive rotated


@dataclass(frozen=True, slots=True)
class Plan:
    """``info`` is what the kernel is launched with, in the module's own array; equal for all plans of a batch size."""

    info: Any
    is_split: bool
    chunk_size_offset: int  # byte offset of the chunk size, int32 in tokens, in the plan's memory


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Where a plan goes: split results, the lists on the device, and the lists in pinned memory on their way there."""

    workspace: torch.Tensor
    integers: torch.Tensor
    pinned: torch.Tensor


class Schedule(Protocol):
    """One of FlashInfer's kernels: how it cuts up a batch, and how it is launched."""

    def plan(self, memory: PlanMemory, indptr: Ints) -> Plan: ...

    def pages_read(self, indptr: Ints) -> Ints:
        """int32 [rows]: pages of each row that count for its number of chunks."""
        ...

    def run(self, arguments: tuple[Any, ...], table: PageTable[torch.Tensor], out: torch.Tensor, scale: float) -> None:
        """``arguments`` are the workspace, the plan's lists and info, q, K and V."""
        ...


class CudaCoreSchedule:
    """The kernel without tensor cores; ``programmatic_launch`` lets it start while its predecessor drains."""

    def __init__(self, shape: AttentionShape, *, programmatic_launch: bool = True) -> None:
        """Raises ConfigError for a group that it is not compiled for, CudaUnavailable as ``load_kernel`` does."""
        if shape.group not in CUDA_CORE_GROUPS:
            raise ConfigError(f"heads / kv_heads: this kernel needs one of {CUDA_CORE_GROUPS}, got {shape.group}")
        self._shape = shape
        self._module = load_kernel(shape, Kernel.CUDA_CORES)
        self._programmatic_launch = programmatic_launch
        self._dtypes = (torch.empty(0, dtype=torch.bfloat16), torch.empty(0, dtype=shape.kv_dtype))

    def plan(self, memory: PlanMemory, indptr: Ints) -> Plan:
        shape = self._shape
        info = self._module.plan(
            memory.workspace,
            memory.integers,
            memory.pinned,
            torch.from_numpy(indptr),
            len(indptr) - 1,
            shape.heads,
            shape.kv_heads,
            shape.block_size,
            True,  # for a graph
            shape.window_left,
            0.0,  # no soft cap
            shape.head_dim,
            shape.head_dim,
            *self._dtypes,
        )
        return Plan(info, is_split=bool(info[9]), chunk_size_offset=int(info[7]))

    def pages_read(self, indptr: Ints) -> Ints:
        return np.diff(indptr)

    def run(self, arguments: tuple[Any, ...], table: PageTable[torch.Tensor], out: torch.Tensor, scale: float) -> None:
        tables = (table.indptr, table.indices, table.last_page)
        launch = (None, HND, self._shape.window_left, self._programmatic_launch)
        self._module.run(*arguments, *tables, out, *launch, None, 0.0, scale, *_ROPE_UNUSED)


class TensorCoreSchedule:
    """fa2's prefill kernel on one query row per sequence: the heads of a group fill the rows of its tile."""

    def __init__(self, shape: AttentionShape, *, programmatic_launch: bool = True) -> None:
        """Raises CudaUnavailable as ``load_kernel`` does."""
        self._shape = shape
        self._module = load_kernel(shape, Kernel.FA2)
        self._programmatic_launch = programmatic_launch
        self._tile = 16 if shape.group <= 16 else 64
        self._starts = torch.zeros(0, dtype=torch.int32)
        self._host_starts = self._starts

    def plan(self, memory: PlanMemory, indptr: Ints) -> Plan:
        shape, rows = self._shape, len(indptr) - 1
        if len(self._starts) != rows + 1:
            self._host_starts = torch.arange(rows + 1, dtype=torch.int32)
            self._starts = self._host_starts.to(memory.integers.device)
        pages = torch.from_numpy(indptr)
        info = self._module.plan(
            memory.workspace,
            memory.integers,
            memory.pinned,
            self._host_starts,
            pages,
            pages,  # lengths: fa2 does not read them
            rows,
            rows,
            shape.heads,
            shape.kv_heads,
            shape.block_size,
            True,  # for a graph
            shape.head_dim,
            shape.head_dim,
            False,  # causal: one row sees all
            shape.window_left,
            -1,  # no fixed split size
            False,  # splitting allowed
            0,  # no CTAs of other kernels
        )
        return Plan(info, is_split=bool(info[14]), chunk_size_offset=int(info[9]))

    def pages_read(self, indptr: Ints) -> Ints:
        pages = np.diff(indptr)
        if self._shape.window is None:
            return pages
        return np.minimum(pages, -(-(self._shape.window_left + self._tile) // self._shape.block_size))

    def run(self, arguments: tuple[Any, ...], table: PageTable[torch.Tensor], out: torch.Tensor, scale: float) -> None:
        tables = (self._starts, table.indptr, table.indices, table.last_page)
        launch = (None, NON_CAUSAL, HND, self._shape.window_left, self._programmatic_launch)
        self._module.paged_run(*arguments, *tables, out, *launch, *(None,) * 8, 0.0, scale, *_ROPE_UNUSED, 0)


class PlannedDecode:
    """One batch size's decode attention by one of FlashInfer's kernels."""

    def __init__(
        self,
        shape: AttentionShape,
        rows: int,
        pool: torch.Tensor,
        table: PageTable[torch.Tensor],
        workspace: torch.Tensor,
        schedule: Schedule,
    ) -> None:
        self._shape = shape
        self._table = table
        self._views = shape.layer_views(pool)
        self._schedule = schedule
        self._workspace = workspace
        self._integers = torch.zeros(_PLAN_BYTES, dtype=torch.uint8, device=pool.device)
        self._staging = PlanStaging(_PLAN_BYTES)
        self.plans = 0  # how often the work was cut up anew
        self.plan_anew(np.arange(rows + 1, dtype=np.int32))

    def plan(self, indptr: Ints) -> None:
        """See ``DecodeAttention.plan``."""
        if self._plan.is_split and not self._still_serves(indptr):
            self.plan_anew(indptr)

    def plan_anew(self, indptr: Ints) -> None:
        """Cut up the work even if the last plan would serve."""
        with self._staging.lend() as pinned:
            plan = self._schedule.plan(PlanMemory(self._workspace, self._integers, pinned), indptr)
            tokens = int(pinned[plan.chunk_size_offset :][:4].view(torch.int32)[0])
        self.plans += 1
        self._plan = plan
        self._chunk_pages = max(tokens // self._shape.block_size, 1)
        self._chunks = self._chunks_needed(indptr)

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """``q`` and ``out`` bf16 [rows, heads, head_dim]. See ``DecodeAttention.run``."""
        k, v = self._views[layer]
        scale = self._shape.kv_scale(layer)
        arguments = (self._workspace, self._integers, self._plan.info, q, k, v)
        self._schedule.run(arguments, self._table, out, self._shape.scale * scale.k)
        if scale.v != 1.0:
            out.mul_(scale.v)

    def _still_serves(self, indptr: Ints) -> bool:
        return np.array_equal(self._chunks_needed(indptr), self._chunks)

    def _chunks_needed(self, indptr: Ints) -> Ints:
        return -(-self._schedule.pages_read(indptr) // self._chunk_pages)
