"""Chunks that see unequally far in one step: which kernel computes which rows, and where their plans lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from baton.core.errors import ConfigError
from baton.engine.cuda import prefill_attention
from baton.engine.cuda.attention_shape import AttentionShape, ChunkTable, PageTable
from baton.engine.cuda.flashinfer_kernels import Kernel
from baton.engine.cuda.prefill_attention import PrefillAttention
from tests.unit.engine.cuda.cpu_doubles import no_device

__all__ = ["no_device"]

pytestmark = pytest.mark.usefixtures("no_device")

SHAPE = AttentionShape(layers=2, heads=4, kv_heads=2, head_dim=64, block_size=4, scale=0.125)
POOL = torch.zeros(8, 2, 2, 2, 4, 64, dtype=torch.bfloat16)
FULL = 7  # what a list of a plan is filled with


@dataclass
class Compiled:
    """A module whose plans are as long as FlashInfer's: as many works a head as there are chunks. It notes its calls
    and, launched, writes its number into the rows that it is given."""

    kernel: Kernel
    windowed: bool
    planned: list[dict[str, Any]] = field(default_factory=list)
    launched: list[dict[str, Any]] = field(default_factory=list)

    def plan(self, workspace: torch.Tensor, integers: torch.Tensor, pinned: torch.Tensor, *arguments: Any) -> list[int]:
        starts, pages, lengths, rows, chunks = arguments[:5]
        assert rows == starts[-1]
        assert len(starts) == len(pages) == chunks + 1 == len(lengths) + 1
        info, end = self._fa2(chunks, rows) if self.kernel is Kernel.FA2 else self._fa3(chunks * SHAPE.heads)
        assert not pinned[:end].any(), "the lists of another group are still to be copied"
        pinned[:end] = FULL
        integers[:end].copy_(pinned[:end])
        self.planned.append({"starts": starts.tolist(), "lengths": lengths.tolist(), "left": arguments[12]})
        return info

    def _fa3(self, works: int) -> tuple[list[int], int]:
        """What plan() returns, and where its last list ends; of the lists one is as long as there are processors."""
        offsets, end = _laid_out([works * 4] * 6 + [133 * 4] + [works * 4])
        return [*offsets, 0], end

    def _fa2(self, works: int, rows: int) -> tuple[list[int], int]:
        """The same; with an even number of rows the work is split, which takes two lists more."""
        is_split = rows % 2 == 0
        lists = [works * 4] * 3 + [(works + 1) * 4, 4] + ([(rows + 1) * 4, works] if is_split else [])
        offsets, end = _laid_out(lists)
        request, tiles, kv_tiles, outputs, size, merge, valid = [*offsets, 0, 0][:7]
        return [works, rows, 0, 64, request, tiles, kv_tiles, merge, outputs, size, 0, 0, valid, 0, int(is_split)], end

    def paged_run(self, workspace: torch.Tensor, integers: torch.Tensor, info: list[int], *arguments: Any) -> None:
        q, _, _, starts, indptr, _, last_page, out = arguments[:8]
        assert len(starts) == len(indptr) == len(last_page) + 1
        assert integers[0] == FULL
        out.fill_(float(q[0, 0, 0]))
        self.launched.append({"rows": len(q), "left": arguments[11], "starts": starts.tolist()})


def _laid_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where lists of so many bytes begin, and where the last one ends."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(-(-end // 16) * 16)
        end = offsets[-1] + size
    return offsets, end


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    made: list[Compiled] = []

    def load(shape: AttentionShape, kernel: Kernel) -> Compiled:
        made.append(Compiled(kernel, shape.window is not None))
        return made[-1]

    monkeypatch.setattr(prefill_attention, "load_kernel", load)
    monkeypatch.setattr(prefill_attention, "QueryQuantizer", lambda library, device: Rounding())
    return made


class Rounding:
    def quantize(self, q: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(q)


def attention(shape: AttentionShape, kernel: Kernel | None = None) -> PrefillAttention:
    library: Any = None
    return PrefillAttention(shape, 128, POOL.to(shape.kv_dtype), torch.zeros(64), library, kernel)


def table(starts: Sequence[int], window: int | None) -> ChunkTable[Any]:
    """Chunks over as many pages as they have rows."""
    chunks = len(starts) - 1
    pages = PageTable(np.array(starts, np.int32), np.zeros(99, np.int32), np.full(chunks, 3, np.int32))
    return ChunkTable(np.array(starts, np.int32), pages, window)


def on_device(tables: Sequence[ChunkTable[Any]]) -> list[ChunkTable[Any]]:
    made: list[ChunkTable[Any]] = []
    for each in tables:
        pages = [torch.from_numpy(array) for array in (each.pages.indptr, each.pages.indices, each.pages.last_page)]
        made.append(ChunkTable(torch.from_numpy(each.starts), PageTable(*pages), each.window))
    return made


def run(of: PrefillAttention, tables: Sequence[ChunkTable[Any]]) -> list[float]:
    """The number that the launch of each row left: the row at which its group begins."""
    of.plan(tables, on_device(tables))
    rows = sum(int(each.starts[-1]) for each in tables)
    q = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, 256).to(torch.bfloat16)
    out = torch.full((rows, 256), -1.0, dtype=torch.bfloat16)
    of.run(1, q, out)
    assert (out == out[:, :1]).all()
    return out[:, 0].tolist()


def test_each_group_is_launched_over_its_own_rows_with_its_own_window(modules: list[Compiled]) -> None:
    left = run(attention(SHAPE), [table([0, 3, 5], None), table([0, 4], 6), table([0, 2, 4, 6], 1)])
    assert left == [0.0] * 5 + [5.0] * 4 + [9.0] * 6
    plain, windowed = modules
    assert (plain.windowed, windowed.windowed) == (False, True)
    assert [(call["rows"], call["left"]) for call in plain.launched] == [(5, -1)]
    assert [(call["rows"], call["left"]) for call in windowed.launched] == [(4, 5), (6, 0)]
    assert [call["left"] for call in windowed.planned] == [5, 0]
    assert plain.planned[0]["lengths"] == [2 * 4 + 3, 4 + 3]


def test_without_windows_nothing_else_is_loaded(modules: list[Compiled]) -> None:
    run(attention(SHAPE), [table([0, 3], None)])
    assert [module.windowed for module in modules] == [False]


def test_the_next_steps_plans_take_the_place_of_the_last_ones(modules: list[Compiled]) -> None:
    """Two pinned buffers take turns; each is free again when its turn comes, which the fake checks by zeros."""
    of = attention(SHAPE)
    for size in (3, 5):
        assert run(of, [table([0, size], None), table([0, 2], 9)]) == [0.0] * size + [float(size)] * 2
        for buffer in of._staging._buffers:
            buffer.zero_()


def test_a_models_own_window_has_one_module_for_all(modules: list[Compiled]) -> None:
    run(attention(replace(SHAPE, window=8)), [table([0, 3], None), table([0, 4], 5)])
    (only,) = modules
    assert only.windowed
    assert [call["left"] for call in only.launched] == [7, 4]


def test_windows_over_an_fp8_pool_are_computed_from_unrounded_queries(modules: list[Compiled]) -> None:
    tables = [table([0, 2], None), *(table([0, rows, 20 + rows], 5 + rows) for rows in (2, 1, 3, 4))]
    run(attention(replace(SHAPE, kv_dtype=torch.float8_e4m3fn)), tables)
    assert [(module.kernel, module.windowed) for module in modules] == [(Kernel.FA3_FP8, False), (Kernel.FA2, True)]


def test_the_kernel_without_windows_is_refused_for_a_shape_with_one() -> None:
    shape = replace(SHAPE, kv_dtype=torch.float8_e4m3fn, window=5)
    with pytest.raises(ConfigError, match="fa3_fp8 has no windows"):
        attention(shape, Kernel.FA3_FP8)
