"""Attention on the GPU, alone: microseconds a layer for each backend, and what planning costs the host.

``python -m bench.cuda_attention`` prints tables; with ``--decode split --prefill none`` FlashInfer compiles nothing.
Decode layers are replayed from one CUDA graph over so many layers that no key is in a cache; TB/s counts K and V once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from baton.engine.cuda.attention import DecodeBackend as Backend
from baton.engine.cuda.attention import allocate_workspace, decode_kernels
from baton.engine.cuda.attention_shape import AttentionShape, ChunkTable, PageTable
from baton.engine.cuda.build import build
from baton.engine.cuda.decode_kernel import SplitDecode
from baton.engine.cuda.flashinfer_decode import CudaCoreSchedule, PlannedDecode, TensorCoreSchedule
from baton.engine.cuda.flashinfer_kernels import Kernel, compile_kernels
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.prefill_attention import PrefillAttention

Pages = PageTable[torch.Tensor]
Decode = SplitDecode | PlannedDecode

BATCHES = ((1, 1024), (1, 8192), (4, 1024), (16, 1024), (16, 8192), (64, 1024), (256, 128), (256, 1024))
MODELS = {"32/8 d128": (32, 8, 128), "16/8 d128": (16, 8, 128), "9/3 d64": (9, 3, 64)}
CHUNKS = (("2048", 0, 2048), ("8192", 0, 8192), ("2048 at 6144", 6144, 2048))
BLOCK = 16
WINDOWED = (64, 4096, 1024)  # rows, tokens of each, window
CACHE_BYTES = 300 << 20  # K and V of all layers together: several times the L2 cache
ROUNDS = 7


class Bench:
    """One GPU, its library and workspace."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self.library = CudaLibrary(build())
        self.workspace = allocate_workspace(self.device)

    # ---------------------------------------------------------------------------------------------------------- decode

    def decode(self, name: str, backends: list[Backend], kv_dtype: torch.dtype) -> None:
        heads, kv_heads, dim = MODELS[name]
        print(f"decode {name} {str(kv_dtype).removeprefix('torch.')}: us a layer (TB/s)")
        for rows, length in BATCHES:
            layer_bytes = rows * length * kv_heads * dim * 2 * kv_dtype.itemsize
            layers = max(4, min(80, -(-CACHE_BYTES // layer_bytes)))
            shape = AttentionShape(layers, heads, kv_heads, dim, BLOCK, dim**-0.5, kv_dtype=kv_dtype)
            print(f"  B{rows} x {length}:", ", ".join(self._decode_row(shape, rows, length, layer_bytes, backends)))

    def _decode_row(
        self, shape: AttentionShape, rows: int, length: int, layer_bytes: int, backends: list[Backend]
    ) -> list[str]:
        pages = length // BLOCK
        pool = self._pool(shape, rows * pages)
        host, table = self._table(rows, pages)
        cells: list[str] = []
        for label, make in self._candidates(shape, rows, pool, table, backends):
            attention = make()
            attention.plan(host)
            microseconds = self._graph_time(shape, rows, attention)
            cells.append(f"{label} {microseconds:.1f} ({layer_bytes / microseconds / 1e6:.2f})")
        return cells

    def _candidates(
        self, shape: AttentionShape, rows: int, pool: torch.Tensor, table: Pages, backends: list[Backend]
    ) -> list[tuple[str, Callable[[], Decode]]]:
        common = (shape, rows, pool, table, self.workspace)
        made: list[tuple[str, Callable[[], Decode]]] = []
        if Backend.SPLIT in backends:
            made += [
                ("split", partial(SplitDecode, *common, self.library)),
                ("split, no overlap", partial(SplitDecode, *common, self.library, programmatic_launch=False)),
                ("split, shares >= 4", partial(SplitDecode, *common, self.library, least_pieces=4)),
            ]
        if Backend.CUDA_CORES in backends:
            made.append(("cuda cores", lambda: PlannedDecode(*common, CudaCoreSchedule(shape))))
        if Backend.TENSOR_CORES in backends:
            made.append(("tensor cores", lambda: PlannedDecode(*common, TensorCoreSchedule(shape))))
        return made

    def _graph_time(self, shape: AttentionShape, rows: int, attention: Decode) -> float:
        q = torch.randn(rows, shape.heads, shape.head_dim, device=self.device).to(torch.bfloat16)
        out = torch.empty_like(q)
        attention.run(0, q, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(shape.layers):
                attention.run(layer, q, out)
        return self._median_time(graph.replay) / shape.layers

    def windows(self, name: str, kv_dtype: torch.dtype) -> None:
        """Our kernel where no row has a window, every other one has, and all have."""
        heads, kv_heads, dim = MODELS[name]
        rows, length, window = WINDOWED
        shape = AttentionShape(8, heads, kv_heads, dim, BLOCK, dim**-0.5, kv_dtype=kv_dtype)
        pool = self._pool(shape, rows * length // BLOCK)
        cells: list[str] = []
        for label, seen in (("none", [length, length]), ("half", [length, window]), ("all", [window, window])):
            pages = np.array([seen[row % 2] // BLOCK for row in range(rows)], np.int32)
            attention = SplitDecode(shape, rows, pool, self._ragged_table(pages), self.workspace, self.library)
            cells.append(f"{label} {self._graph_time(shape, rows, attention):.1f}")
        print(f"decode {name}, B{rows} x {length}, windows of {window}: us a layer,", ", ".join(cells))

    def plans(self, backends: list[Backend]) -> None:
        """Host microseconds of plan(): cut up anew, and when the old plan serves."""
        print("plan() on the host, 32/8 d128: us anew / us kept")
        shape = AttentionShape(2, 32, 8, 128, BLOCK, 128**-0.5)
        for rows in (1, 64, 256):
            pool = self._pool(shape, rows * 65)
            host, table = self._table(rows, 65)
            cells: list[str] = []
            for label, make in self._candidates(shape, rows, pool, table, backends):
                attention = make()
                if isinstance(attention, PlannedDecode):
                    anew = self._host_time(partial(attention.plan_anew, host))
                    cells.append(f"{label} {anew:.0f} / {self._host_time(partial(attention.plan, host)):.1f}")
            print(f"  B{rows}:", ", ".join(cells) or "nothing to plan")

    # --------------------------------------------------------------------------------------------------------- prefill

    def prefill(self, name: str, kernels: list[Kernel]) -> None:
        heads, kv_heads, dim = MODELS[name]
        bf16 = AttentionShape(8, heads, kv_heads, dim, BLOCK, dim**-0.5)
        for kernel in kernels:
            shape = replace(bf16, kv_dtype=torch.float8_e4m3fn) if kernel is Kernel.FA3_FP8 else bf16
            pool = self._pool(shape, 8192 // BLOCK)
            attention = PrefillAttention(shape, 8192, pool, self.workspace, self.library, kernel)
            print(f"prefill {name} {kernel.value}: ms a layer (TFLOP/s), plan us")
            for label, start, rows in CHUNKS:
                print(f"  {label}: {self._prefill_cell(shape, attention, start, rows)}")

    def _prefill_cell(self, shape: AttentionShape, attention: PrefillAttention, start: int, rows: int) -> str:
        host_pages, table = self._table(1, (start + rows) // BLOCK)
        last = np.array([BLOCK], np.int32)
        host = ChunkTable(np.array([0, rows], np.int32), PageTable(host_pages, host_pages, last))
        device = ChunkTable(torch.tensor([0, rows], dtype=torch.int32, device=self.device), table)
        q = torch.randn(rows, shape.heads * shape.head_dim, device=self.device).to(torch.bfloat16)
        out = torch.empty_like(q)
        plan = self._host_time(partial(attention.plan, [host], [device]))

        def layers() -> None:
            for layer in range(shape.layers):
                attention.run(layer, q, out)

        milliseconds = self._median_time(layers) / shape.layers / 1e3
        pairs = rows * start + rows * (rows + 1) / 2
        flops = 4 * pairs * shape.heads * shape.head_dim
        return f"{milliseconds:.3f} ({flops / milliseconds / 1e9:.0f}), {plan:.0f}"

    # ------------------------------------------------------------------------------------------------------------ tools

    def _pool(self, shape: AttentionShape, blocks: int) -> torch.Tensor:
        dimensions = (blocks, shape.layers, 2, shape.kv_heads, BLOCK, shape.head_dim)
        pool = torch.empty(dimensions, dtype=torch.bfloat16, device=self.device).normal_()
        return pool if shape.kv_dtype == torch.bfloat16 else pool.to(shape.kv_dtype)

    def _table(self, rows: int, pages: int) -> tuple[np.ndarray, Pages]:
        """The host's indptr and the device's table: scattered blocks, the last one full."""
        indptr = np.arange(rows + 1, dtype=np.int32) * pages
        blocks = torch.randperm(rows * pages, device=self.device, dtype=torch.int32)
        last_page = torch.full((rows,), BLOCK, dtype=torch.int32, device=self.device)
        return indptr, PageTable(torch.from_numpy(indptr).to(self.device), blocks, last_page)

    def _ragged_table(self, pages: np.ndarray) -> Pages:
        """Scattered blocks, ``pages`` of each row, the last one full and all of the first one seen."""
        indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(pages))).astype(np.int32)).to(self.device)
        blocks = torch.randperm(int(pages.sum()), device=self.device, dtype=torch.int32)
        last_page, hidden = (torch.full((len(pages),), of, dtype=torch.int32, device=self.device) for of in (BLOCK, 0))
        return PageTable(indptr, blocks, last_page, hidden)

    def _median_time(self, work: Callable[[], None]) -> float:
        """Microseconds of device time, the median of some rounds after a warm-up."""
        times: list[float] = []
        for _ in range(ROUNDS + 2):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            work()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) * 1e3)
        return statistics.median(times[2:])

    def _host_time(self, work: Callable[[], object]) -> float:
        times: list[float] = []
        for _ in range(30):
            torch.cuda.synchronize()
            before = time.perf_counter()
            work()
            times.append((time.perf_counter() - before) * 1e6)
        return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention on the GPU, backend by backend.")
    parser.add_argument("--decode", default="split,tensor_cores,cuda_cores", help="backends, separated by commas")
    parser.add_argument("--prefill", default="fa3,fa2", help="of fa3, fa2 and fa3_fp8; or none")
    parser.add_argument("--models", default="32/8 d128,16/8 d128")
    parser.add_argument("--fp8", action="store_true", help="also decode over an e4m3 pool with our own kernel")
    options = parser.parse_args()
    backends = [Backend(name) for name in options.decode.split(",")]
    kernels = [Kernel(name) for name in options.prefill.split(",") if name != "none"]
    bench, models = Bench(), options.models.split(",")
    shape = AttentionShape(2, 32, 8, 128, BLOCK, 1.0)
    wanted = {kernel for backend in backends for kernel in decode_kernels(backend)} | {*kernels} - {Kernel.FA3_FP8}
    compile_kernels([(shape, kernel) for kernel in sorted(wanted, key=lambda one: one.value)])
    for name in models:
        bench.decode(name, backends, torch.bfloat16)
    if options.fp8:
        bench.decode(models[0], [Backend.SPLIT], torch.float8_e4m3fn)
    if Backend.SPLIT in backends:
        for name in models:
            bench.windows(name, torch.bfloat16)
    bench.plans(backends)
    bench.prefill(models[0], kernels)


if __name__ == "__main__":
    main()
