"""Our own decode kernel against float32 attention over the same pool, and prefill by fa3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from baton.core.errors import ConfigError
from baton.engine.cuda.attention import DecodeAttention, DecodeBackend, allocate_workspace
from baton.engine.cuda.attention_shape import AttentionShape, ChunkTable, KvScale
from baton.engine.cuda.build import build
from baton.engine.cuda.decode_kernel import QueryQuantizer, SplitDecode
from baton.engine.cuda.flashinfer_kernels import Kernel, compile_kernels
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.prefill_attention import PrefillAttention
from tests.gpu.paged import (
    DEVICE,
    PagedKv,
    attention_shape,
    chunks_on_device,
    copy_into,
    fp8,
    on_device,
    relative_errors,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = 6e-3  # weights and results are rounded to bf16, 2^-9 each
LLAMA, SMALL_QWEN, SMOLLM = attention_shape(32, 8, 128), attention_shape(16, 8, 128), attention_shape(9, 3, 64)
ODD_GROUP, PLAIN, WIDE_GROUP = attention_shape(14, 2, 64), attention_shape(4, 4, 128), attention_shape(64, 8, 128)
SHAPES = [LLAMA, SMALL_QWEN, SMOLLM, ODD_GROUP, PLAIN, WIDE_GROUP]


@pytest.fixture(scope="module")
def library() -> CudaLibrary:
    return CudaLibrary(build())


@pytest.fixture(scope="module")
def workspace() -> Iterator[torch.Tensor]:
    yield allocate_workspace(DEVICE)


def lengths_for(rows: int, seed: int, longest: int = 3000) -> list[int]:
    """Every residue of the block size first, then anything up to ``longest``."""
    random = np.random.default_rng(seed)
    return [*range(1, min(rows, 34) + 1), *random.integers(1, longest + 1, max(rows - 34, 0)).tolist()]


def decode(
    kv: PagedKv,
    lengths: Sequence[int],
    workspace: torch.Tensor,
    library: CudaLibrary,
    q: torch.Tensor,
    backend: DecodeBackend = DecodeBackend.SPLIT,
) -> torch.Tensor:
    rows = len(lengths)
    host = kv.table(lengths)
    attention = DecodeAttention(kv.shape, rows, kv.pool, on_device(host), workspace, library, backend)
    attention.plan(host.indptr)
    out = torch.full((rows, q.shape[1]), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    torch.cuda.synchronize()
    attention.run(1, q, out)
    return out


def expect_exact(kv: PagedKv, lengths: Sequence[int], q: torch.Tensor, out: torch.Tensor, tolerance: float) -> None:
    rows = [kv.reference(1, row, q[row : row + 1], length) for row, length in enumerate(lengths)]
    errors = relative_errors(out, torch.cat(rows))
    assert not errors.isnan().any(), f"rows {errors.isnan().nonzero().flatten().tolist()} hold NaN"
    assert errors.max() < tolerance, f"row {int(errors.argmax())} of length {lengths[int(errors.argmax())]}"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.heads}x{shape.kv_heads}x{shape.head_dim}")
@pytest.mark.parametrize("rows", [1, 2, 16, 40, 64, 256])
def test_decode_equals_float32_attention(
    shape: AttentionShape, rows: int, workspace: torch.Tensor, library: CudaLibrary
) -> None:
    lengths = lengths_for(rows, seed=rows)
    kv = PagedKv(shape, lengths, seed=rows)
    q = kv.queries(rows, seed=1)
    expect_exact(kv, lengths, q, decode(kv, lengths, workspace, library, q), TOLERANCE)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 1024, 2999, 20000])
def test_one_row_of_any_length_is_split_without_a_trace(
    length: int, workspace: torch.Tensor, library: CudaLibrary
) -> None:
    kv = PagedKv(LLAMA, [length], seed=length)
    q = kv.queries(1, seed=1)
    expect_exact(kv, [length], q, decode(kv, [length], workspace, library, q), TOLERANCE)


def test_one_long_row_among_short_ones(workspace: torch.Tensor, library: CudaLibrary) -> None:
    lengths = [3, 30000, 70, 1, 500]
    kv = PagedKv(LLAMA, lengths, seed=5)
    q = kv.queries(5, seed=1)
    expect_exact(kv, lengths, q, decode(kv, lengths, workspace, library, q), TOLERANCE)


@pytest.mark.parametrize("block_size", [32, 64])
def test_larger_blocks(block_size: int, workspace: torch.Tensor, library: CudaLibrary) -> None:
    lengths = lengths_for(48, seed=2)
    kv = PagedKv(attention_shape(32, 8, 128, block_size=block_size), lengths, seed=2)
    q = kv.queries(48, seed=1)
    expect_exact(kv, lengths, q, decode(kv, lengths, workspace, library, q), TOLERANCE)


@pytest.mark.parametrize("window", [1, 16, 100, 4096])
def test_a_window_hides_older_tokens(window: int, workspace: torch.Tensor, library: CudaLibrary) -> None:
    lengths = lengths_for(48, seed=3)
    kv = PagedKv(attention_shape(32, 8, 128, window=window), lengths, seed=3)
    q = kv.queries(48, seed=1)
    expect_exact(kv, lengths, q, decode(kv, lengths, workspace, library, q), TOLERANCE)


@pytest.mark.parametrize("shape", [LLAMA, SMOLLM, WIDE_GROUP])
def test_fp8_keys_and_values(shape: AttentionShape, workspace: torch.Tensor, library: CudaLibrary) -> None:
    lengths = lengths_for(48, seed=4)
    kv = PagedKv(fp8(shape), lengths, seed=4)
    q = kv.queries(48, seed=1)
    expect_exact(kv, lengths, q, decode(kv, lengths, workspace, library, q), TOLERANCE)


def test_fp8_scales_of_the_layer_apply(workspace: torch.Tensor, library: CudaLibrary) -> None:
    lengths = lengths_for(20, seed=4)
    shape = fp8(LLAMA)
    kv = PagedKv(shape, lengths, seed=4)
    q = kv.queries(20, seed=1)
    scaled = AttentionShape(
        shape.layers,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.block_size,
        shape.scale / 2,
        kv_dtype=shape.kv_dtype,
        kv_scales=(KvScale(9.0, 9.0), KvScale(2.0, 0.5)),
    )
    plain = decode(kv, lengths, workspace, library, q)
    kv.shape = scaled
    torch.testing.assert_close(decode(kv, lengths, workspace, library, q), plain * 0.5, rtol=0, atol=0)


def test_results_do_not_depend_on_timing(workspace: torch.Tensor, library: CudaLibrary) -> None:
    lengths = lengths_for(30, seed=6)
    kv = PagedKv(LLAMA, lengths, seed=6)
    q = kv.queries(30, seed=1)
    host = kv.table(lengths)
    attention = SplitDecode(LLAMA, 30, kv.pool, on_device(host), workspace, library)
    outs = [torch.empty(30, 32, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(30)]
    torch.cuda.synchronize()
    for out in outs:
        attention.run(0, q.unflatten(1, (32, 128)), out)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("rows", [1, 8, 128])
def test_replays_follow_the_table_and_equal_eager_runs(
    rows: int, workspace: torch.Tensor, library: CudaLibrary
) -> None:
    lengths = lengths_for(rows, seed=8, longest=600)
    kv = PagedKv(LLAMA, lengths, seed=8, room=64)
    full = on_device(kv.table([length + 64 for length in lengths]))
    attention = DecodeAttention(LLAMA, rows, kv.pool, full, workspace, library)
    q = kv.queries(rows, seed=1)
    replayed = torch.zeros(rows, q.shape[1], dtype=torch.bfloat16, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    attention.run(0, q, replayed)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        attention.run(0, q, replayed)
        attention.run(1, q, replayed)
    for grown in (0, 1, 15, 16, 33, 64):
        now = [length + grown for length in lengths]
        host = kv.table(now)
        copy_into(full, host)
        attention.plan(host.indptr)
        graph.replay()
        expect_exact(kv, now, q, replayed, TOLERANCE)
        assert torch.equal(decode(kv, now, workspace, library, q), replayed)


def test_a_head_size_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim"):
        attention_shape(32, 8, 96)


def test_queries_that_overflow_fp8_become_the_largest_value(library: CudaLibrary) -> None:
    q = torch.tensor([[1.0, -0.3, 1e4, -1e9], [0.0, 448.0, 449.0, 2.0]], dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty(2, 4, dtype=torch.float8_e4m3fn, device=DEVICE)
    QueryQuantizer(library, DEVICE).quantize(q, out)
    assert out.float().tolist() == [[1.0, -0.3125, 448.0, -448.0], [0.0, 448.0, 448.0, 2.0]]


# ------------------------------------------------------------------------------------------------------------- prefill


@pytest.fixture(scope="module")
def fa3() -> None:
    compile_kernels([(LLAMA, Kernel.FA3)])


def prefill(
    kv: PagedKv,
    spans: Sequence[tuple[int, int]],
    workspace: torch.Tensor,
    library: CudaLibrary,
    q: torch.Tensor,
    kernel: Kernel | None = None,
) -> torch.Tensor:
    """``spans`` are the rows [start, end) of each sequence that this step computes."""
    sizes = [end - start for start, end in spans]
    starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    oldest = [0 if kv.shape.window is None else max(0, start + 1 - kv.shape.window) for start, _ in spans]
    host = ChunkTable(starts, kv.table_from(oldest, [end for _, end in spans]))
    attention = PrefillAttention(kv.shape, int(starts[-1]), kv.pool, workspace, library, kernel)
    attention.plan([host], [chunks_on_device(host)])
    out = torch.full((int(starts[-1]), q.shape[1]), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    attention.run(1, q, out)
    return out


def expect_exact_chunks(
    kv: PagedKv, spans: Sequence[tuple[int, int]], q: torch.Tensor, out: torch.Tensor, tolerance: float
) -> None:
    row = 0
    for sequence, (start, end) in enumerate(spans):
        rows = slice(row, row + end - start)
        errors = relative_errors(out[rows], kv.reference(1, sequence, q[rows], end))
        assert errors.max() < tolerance, f"sequence {sequence}, rows {start} to {end}"
        row += end - start


@pytest.mark.usefixtures("fa3")
def test_packed_chunks_equal_float32_attention(workspace: torch.Tensor, library: CudaLibrary) -> None:
    spans = [(0, 1), (0, 17), (16, 16 + 300), (999, 1000), (31, 33), (0, 2048), (100, 612), (4096, 4200)]
    kv = PagedKv(LLAMA, [end for _, end in spans], seed=9)
    q = kv.queries(sum(end - start for start, end in spans), seed=1)
    expect_exact_chunks(kv, spans, q, prefill(kv, spans, workspace, library, q), TOLERANCE)


@pytest.mark.usefixtures("fa3")
def test_a_prompt_may_be_cut_anywhere(workspace: torch.Tensor, library: CudaLibrary) -> None:
    kv = PagedKv(LLAMA, [150], seed=10, room=10)
    q = kv.queries(150, seed=1)
    whole = prefill(kv, [(0, 150)], workspace, library, q)
    for cut in (1, 15, 16, 17, 47, 48, 49, 127, 128, 129, 149):
        first = prefill(kv, [(0, cut)], workspace, library, q[:cut])
        second = prefill(kv, [(cut, 150)], workspace, library, q[cut:])
        assert relative_errors(torch.cat((first, second)), whole.float()).max() < TOLERANCE


@pytest.mark.usefixtures("fa3")
def test_plans_made_ahead_do_not_disturb_each_other(workspace: torch.Tensor, library: CudaLibrary) -> None:
    """Step N + 1 is planned while step N waits in the stream: its lists must not reach the device too early."""
    kv = PagedKv(LLAMA, [3000, 700], seed=11)
    attention = PrefillAttention(LLAMA, 4000, kv.pool, workspace, library)
    steps = [[(1000, 3000), (0, 700)], [(0, 500), (600, 700)], [(2999, 3000), (0, 700)]]
    hosts = [
        ChunkTable(
            np.cumsum([0, *(end - start for start, end in spans)], dtype=np.int32), kv.table([end for _, end in spans])
        )
        for spans in steps
    ]
    devices = [chunks_on_device(host) for host in hosts]
    q = kv.queries(2700, seed=1)
    outs = [torch.zeros(int(host.starts[-1]), q.shape[1], dtype=torch.bfloat16, device=DEVICE) for host in hosts]
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    for host, device, out in zip(hosts, devices, outs, strict=True):
        attention.plan([host], [device])
        attention.run(1, q[: len(out)], out)
    for spans, out in zip(steps, outs, strict=True):
        expect_exact_chunks(kv, spans, q, out, TOLERANCE)
