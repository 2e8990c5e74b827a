"""FlashInfer's kernels that the default shapes do not use: other decode backends, windows, FP8, other head sizes.

Compiling them takes minutes when FlashInfer's cache is empty.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.core.errors import ConfigError
from baton.engine.cuda.attention import DecodeAttention, DecodeBackend, allocate_workspace, decode_kernels
from baton.engine.cuda.attention_shape import AttentionShape, first_rows
from baton.engine.cuda.build import build
from baton.engine.cuda.flashinfer_decode import CudaCoreSchedule, PlannedDecode, Schedule, TensorCoreSchedule
from baton.engine.cuda.flashinfer_kernels import Kernel, compile_kernels
from baton.engine.cuda.library import CudaLibrary
from tests.gpu.paged import DEVICE, PagedKv, attention_shape, copy_into, fp8, on_device
from tests.gpu.test_cuda_attention import (
    LLAMA,
    ODD_GROUP,
    TOLERANCE,
    decode,
    expect_exact,
    expect_exact_chunks,
    lengths_for,
    prefill,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),
]

WINDOWED = attention_shape(32, 8, 128, window=100)
BACKENDS = [DecodeBackend.CUDA_CORES, DecodeBackend.TENSOR_CORES]
FP8_QUERY_TOLERANCE = 6e-2  # q, k, v and the weights all have three bits of mantissa


@pytest.fixture(scope="module")
def library() -> CudaLibrary:
    return CudaLibrary(build())


@pytest.fixture(scope="module")
def workspace() -> torch.Tensor:
    return allocate_workspace(DEVICE)


def schedule_for(shape: AttentionShape, backend: DecodeBackend) -> Schedule:
    compile_kernels([(shape, kernel) for kernel in decode_kernels(backend)])
    return CudaCoreSchedule(shape) if backend is DecodeBackend.CUDA_CORES else TensorCoreSchedule(shape)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 16, 40, 256])
def test_decode_equals_float32_attention(
    backend: DecodeBackend, rows: int, workspace: torch.Tensor, library: CudaLibrary
) -> None:
    lengths = lengths_for(rows, seed=rows)
    kv = PagedKv(LLAMA, lengths, seed=rows)
    q = kv.queries(rows, seed=1)
    expect_exact(kv, lengths, q, decode(kv, lengths, workspace, library, q, backend), TOLERANCE)


def test_seven_heads_per_kv_head_on_tensor_cores(workspace: torch.Tensor, library: CudaLibrary) -> None:
    lengths = lengths_for(40, seed=1)
    kv = PagedKv(ODD_GROUP, lengths, seed=1)
    q = kv.queries(40, seed=1)
    expect_exact(kv, lengths, q, decode(kv, lengths, workspace, library, q, DecodeBackend.TENSOR_CORES), TOLERANCE)


def test_seven_heads_per_kv_head_without_tensor_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_heads"):
        CudaCoreSchedule(ODD_GROUP)


@pytest.mark.parametrize("rows", [3, 40])
def test_a_window_hides_older_tokens(rows: int, workspace: torch.Tensor, library: CudaLibrary) -> None:
    lengths = lengths_for(rows, seed=3)
    lengths[-1] = 2500
    kv = PagedKv(WINDOWED, lengths, seed=3)
    q = kv.queries(rows, seed=1)
    expect_exact(kv, lengths, q, decode(kv, lengths, workspace, library, q, DecodeBackend.TENSOR_CORES), TOLERANCE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 6, 48, 80])
def test_a_plan_serves_until_a_row_needs_another_chunk(
    backend: DecodeBackend, rows: int, workspace: torch.Tensor
) -> None:
    """Two hundred growing steps: few plans, and never another result than a fresh plan with the same chunk size."""
    lengths = lengths_for(rows, seed=12, longest=900)
    kv = PagedKv(LLAMA, lengths, seed=12, room=200)
    table = first_rows(on_device(kv.table([length + 200 for length in lengths])), rows)
    schedule = schedule_for(LLAMA, backend)
    kept = PlannedDecode(LLAMA, rows, kv.pool, table, workspace, schedule)
    fresh = PlannedDecode(LLAMA, rows, kv.pool, table, workspace, schedule_for(LLAMA, backend))
    q = kv.queries(rows, seed=1)
    split = q.unflatten(1, (LLAMA.heads, LLAMA.head_dim))
    out, expected = (torch.zeros(rows, LLAMA.heads, LLAMA.head_dim, dtype=torch.bfloat16, device=DEVICE) for _ in "ab")
    for step in range(200):
        host = kv.table([length + step for length in lengths])
        copy_into(table, host)
        kept.plan(host.indptr)
        kept.run(1, split, out)
        fresh.plan_anew(host.indptr)
        fresh.run(1, split, expected)
        if fresh._chunk_pages == kept._chunk_pages or not kept._plan.is_split:
            assert torch.equal(out, expected), f"step {step}"
        if step % 40 == 39:
            expect_exact(kv, [length + step for length in lengths], q, out.flatten(1), TOLERANCE)
    assert kept.plans < 200


@pytest.mark.parametrize("backend", BACKENDS)
def test_replays_equal_eager_runs(backend: DecodeBackend, workspace: torch.Tensor, library: CudaLibrary) -> None:
    rows = 24
    lengths = lengths_for(rows, seed=8, longest=600)
    kv = PagedKv(LLAMA, lengths, seed=8, room=64)
    table = on_device(kv.table([length + 64 for length in lengths]))
    attention = DecodeAttention(LLAMA, rows, kv.pool, table, workspace, library, backend)
    q = kv.queries(rows, seed=1)
    replayed, eager = (torch.zeros(rows, q.shape[1], dtype=torch.bfloat16, device=DEVICE) for _ in "ab")
    attention.run(1, q, replayed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(1, q, replayed)
    for grown in (0, 1, 16, 33, 64):
        now = [length + grown for length in lengths]
        host = kv.table(now)
        copy_into(table, host)
        attention.plan(host.indptr)
        graph.replay()
        attention.run(1, q, eager)
        expect_exact(kv, now, q, replayed, TOLERANCE)
        assert torch.equal(eager, replayed)


def test_fp8_keys_and_values_on_tensor_cores(workspace: torch.Tensor, library: CudaLibrary) -> None:
    lengths = lengths_for(48, seed=4)
    kv = PagedKv(fp8(LLAMA), lengths, seed=4)
    q = kv.queries(48, seed=1)
    expect_exact(kv, lengths, q, decode(kv, lengths, workspace, library, q, DecodeBackend.TENSOR_CORES), TOLERANCE)


SPANS = [(0, 1), (0, 17), (16, 316), (999, 1000), (31, 33), (0, 700), (100, 612)]


@pytest.mark.parametrize(
    ("shape", "kernel", "tolerance"),
    [
        (LLAMA, Kernel.FA2, TOLERANCE),
        (attention_shape(9, 3, 64), Kernel.FA3, TOLERANCE),
        (WINDOWED, Kernel.FA3, TOLERANCE),
        (WINDOWED, Kernel.FA2, TOLERANCE),
        (fp8(WINDOWED), Kernel.FA2, TOLERANCE),
        (fp8(LLAMA), Kernel.FA3_FP8, FP8_QUERY_TOLERANCE),
        (fp8(LLAMA), Kernel.FA2, TOLERANCE),
    ],
    ids=["fa2", "fa3-64", "fa3-window", "fa2-window", "fa2-fp8-window", "fa3-fp8", "fa2-fp8"],
)
def test_packed_chunks_equal_float32_attention(
    shape: AttentionShape, kernel: Kernel, tolerance: float, workspace: torch.Tensor, library: CudaLibrary
) -> None:
    compile_kernels([(shape, kernel)])
    kv = PagedKv(shape, [end for _, end in SPANS], seed=9)
    rows = sum(end - start for start, end in SPANS)
    q = kv.queries(rows, seed=1)
    out = prefill(kv, SPANS, workspace, library, q, kernel)
    assert np.isfinite(out.float().norm().item())
    expect_exact_chunks(kv, SPANS, q, out, tolerance)
