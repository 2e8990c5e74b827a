"""Windows by request: rows and chunks of one step that see unequally far, against float32 attention and the reference.

FlashInfer compiles its kernel for windows when its cache lacks it, which takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from baton.core.types import Module
from baton.engine.cuda.attention import DecodeAttention, allocate_workspace, prefill_kernel
from baton.engine.cuda.attention_shape import AttentionShape, ChunkTable, PageTable
from baton.engine.cuda.build import build
from baton.engine.cuda.flashinfer_kernels import compile_kernels
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.prefill_attention import PrefillAttention
from baton.engine.cuda.runner import CudaRunner
from bench.cuda_logits import Line, all_logits, decode_logits, prefill
from bench.forced_tokens import distance
from tests.goldens import DATA
from tests.gpu.gpu_engines import BLOCK, DEVICE, PLAIN, Reference, cuda_runner, decode_ahead, decode_lockstep, lines
from tests.gpu.paged import PagedKv, attention_shape, chunks_on_device, copy_into, fp8, on_device, relative_errors

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),
]

TOLERANCE = 6e-3  # weights and results are rounded to bf16, 2^-9 each
FP8_QUERY_TOLERANCE = 6e-2  # q, k, v and the weights all have three bits of mantissa
LLAMA, SMOLLM, WIDE_GROUP = attention_shape(32, 8, 128), attention_shape(9, 3, 64), attention_shape(64, 8, 128)
BIG_BLOCKS = attention_shape(32, 8, 128, block_size=64)
WINDOWS = (None, 1, 7, 16, None, 17, 100, 1000, 4096)


@pytest.fixture(scope="module")
def library() -> CudaLibrary:
    return CudaLibrary(build())


@pytest.fixture(scope="module")
def workspace() -> Iterator[torch.Tensor]:
    yield allocate_workspace(DEVICE)


# --- decode -----------------------------------------------------------------------------------------------------------


def mixed(rows: int, seed: int, longest: int) -> tuple[list[int], list[int | None]]:
    random = np.random.default_rng(seed)
    lengths = [*range(1, min(rows, 20) + 1), *random.integers(1, longest + 1, max(rows - 20, 0)).tolist()]
    return lengths, [WINDOWS[index % len(WINDOWS)] for index in random.permutation(rows).tolist()]


def expect_windows(
    kv: PagedKv, lengths: Sequence[int], windows: Sequence[int | None], q: torch.Tensor, out: torch.Tensor
) -> None:
    rows = zip(lengths, windows, strict=True)
    wanted = [kv.reference(1, row, q[row : row + 1], length, window) for row, (length, window) in enumerate(rows)]
    errors = relative_errors(out, torch.cat(wanted))
    assert not errors.isnan().any(), f"rows {errors.isnan().nonzero().flatten().tolist()} hold NaN"
    worst = int(errors.argmax())
    assert errors.max() < TOLERANCE, f"row {worst} of length {lengths[worst]}, window {windows[worst]}"


@pytest.mark.parametrize(
    "shape", [LLAMA, SMOLLM, WIDE_GROUP, BIG_BLOCKS, fp8(LLAMA)], ids=["llama", "smollm", "wide", "blocks-64", "fp8"]
)
@pytest.mark.parametrize("rows", [1, 9, 64, 200])
def test_each_row_of_a_decode_batch_sees_as_far_as_its_window(
    shape: AttentionShape, rows: int, workspace: torch.Tensor, library: CudaLibrary
) -> None:
    lengths, windows = mixed(rows, seed=rows, longest=3000)
    lengths[-1], windows[-1] = 2999, 1001
    kv = PagedKv(shape, lengths, seed=rows)
    q = kv.queries(rows, seed=1)
    host = kv.table(lengths, windows)
    attention = DecodeAttention(shape, rows, kv.pool, on_device(host), workspace, library)
    out = torch.full((rows, q.shape[1]), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    torch.cuda.synchronize()
    attention.plan(host.indptr)
    attention.run(1, q, out)
    expect_windows(kv, lengths, windows, q, out)


def test_a_table_that_hides_nothing_gives_the_bits_of_one_that_does_not_say(
    workspace: torch.Tensor, library: CudaLibrary
) -> None:
    lengths, _ = mixed(64, seed=3, longest=2000)
    kv = PagedKv(LLAMA, lengths, seed=3)
    q = kv.queries(64, seed=1)
    said = on_device(kv.table(lengths))
    outs = [torch.zeros(64, q.shape[1], dtype=torch.bfloat16, device=DEVICE) for _ in "ab"]
    torch.cuda.synchronize()
    for out, table in zip(outs, (said, PageTable(said.indptr, said.indices, said.last_page)), strict=True):
        DecodeAttention(LLAMA, 64, kv.pool, table, workspace, library).run(1, q, out)
    assert torch.equal(*outs)


def test_replays_follow_windows_as_they_move_on(workspace: torch.Tensor, library: CudaLibrary) -> None:
    rows = 40
    lengths, windows = mixed(rows, seed=8, longest=600)
    kv = PagedKv(LLAMA, lengths, seed=8, room=64)
    table = on_device(kv.table([length + 64 for length in lengths]))
    attention = DecodeAttention(LLAMA, rows, kv.pool, table, workspace, library)
    q = kv.queries(rows, seed=1)
    out = torch.zeros(rows, q.shape[1], dtype=torch.bfloat16, device=DEVICE)
    attention.run(1, q, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(1, q, out)
    for grown in (0, 1, 15, 16, 33, 64):
        now = [length + grown for length in lengths]
        copy_into(table, kv.table(now, windows))
        graph.replay()
        expect_windows(kv, now, windows, q, out)


# --- prefill ----------------------------------------------------------------------------------------------------------

GROUPS: tuple[tuple[int | None, tuple[tuple[int, int], ...]], ...] = (
    (None, ((0, 17), (0, 700), (999, 1003), (16, 316))),
    (1, ((0, 2), (31, 33), (500, 900))),
    (100, ((0, 50), (0, 700), (100, 612), (2000, 2300), (127, 129))),
    (1024, ((0, 30), (0, 3000), (2000, 2200))),
)


@pytest.mark.parametrize(
    ("shape", "tolerance"),
    [(LLAMA, TOLERANCE), (SMOLLM, TOLERANCE), (fp8(LLAMA), FP8_QUERY_TOLERANCE)],
    ids=["llama", "smollm", "fp8"],
)
def test_chunks_of_one_step_see_as_far_as_their_windows(
    shape: AttentionShape, tolerance: float, workspace: torch.Tensor, library: CudaLibrary
) -> None:
    """Twice, the groups in other orders: the second plans take the place of the first."""
    compile_kernels([(each, prefill_kernel(each)) for each in (shape, shape.windowed)])
    chunks = [(window, span) for window, spans in GROUPS for span in spans]
    kv = PagedKv(shape, [end for _, (_, end) in chunks], seed=9)
    attention = PrefillAttention(shape, sum(end - start for _, (start, end) in chunks), kv.pool, workspace, library)
    for groups in (GROUPS, GROUPS[::-1]):
        order = [chunks.index((window, span)) for window, spans in groups for span in spans]
        hosts = list(_chunk_tables(kv, groups, order))
        attention.plan(hosts, [chunks_on_device(host) for host in hosts])
        rows = sum(int(host.starts[-1]) for host in hosts)
        q = kv.queries(rows, seed=1)
        out = torch.full((rows, q.shape[1]), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        attention.run(1, q, out)
        first = 0
        for sequence in order:
            window, (start, end) = chunks[sequence]
            of = slice(first, first + end - start)
            errors = relative_errors(out[of], kv.reference(1, sequence, q[of], end, window))
            limit = TOLERANCE if window is not None else tolerance
            assert errors.max() < limit, f"rows {start} to {end}, window {window}: {errors.max()}"
            first += end - start


def _chunk_tables(
    kv: PagedKv, groups: Sequence[tuple[int | None, Sequence[tuple[int, int]]]], order: Sequence[int]
) -> Iterator[ChunkTable[np.ndarray]]:
    """As ``Batch`` makes them: blocks that a chunk's first row does not see are left out."""
    blocks = kv.blocks
    first = 0
    for window, spans in groups:
        kv.blocks = [blocks[sequence] for sequence in order[first : first + len(spans)]]
        oldest = [0 if window is None else max(0, start + 1 - window) for start, _ in spans]
        starts = np.cumsum([0, *(end - start for start, end in spans)], dtype=np.int32)
        yield ChunkTable(starts, kv.table_from(oldest, [end for _, end in spans]), window)
        first += len(spans)
    kv.blocks = blocks


# --- the runner -------------------------------------------------------------------------------------------------------

ASKED = (None, 5, 16, 40, None, 33)
NO_WORSE = 1.25  # times what the reference loses by computing in bf16


@pytest.fixture(
    scope="module",
    params=[PLAIN, str(DATA / "tiny" / "mistral-window"), "random:smollm2-135m"],
    ids=["plain", "own-window", "smollm2"],
)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def runner(model: str) -> Iterator[CudaRunner]:
    with cuda_runner(model) as made:
        yield made


@pytest.fixture(scope="module")
def exact(model: str) -> Reference:
    return Reference(model, torch.float32)


@pytest.fixture(scope="module")
def narrow(model: str) -> Reference:
    return Reference(model, torch.bfloat16)


def asking(made: list[Line], shift: int = 0) -> list[Line]:
    for index, line in enumerate(made):
        line.window = ASKED[(index + shift) % len(ASKED)]
    return made


def logits(of: Reference, made: Sequence[Line], last: int | None = None) -> torch.Tensor:
    """Of the lines' own windows; of all tokens, or of the ``last`` ones but the very last, which is not computed."""
    rows = [of.logits(line.tokens if last is None else line.tokens[:-1], line.window) for line in made]
    return torch.cat(rows if last is None else [each[-last:] for each in rows])


def forget(runner: CudaRunner, made: Sequence[Line]) -> None:
    for line in made:
        runner.forget(line.key)


def test_the_card_names_the_module(runner: CudaRunner) -> None:
    assert runner.card.modules == (Module.ATTENTION_WINDOW,)


def test_prompts_with_windows_and_without_share_a_step(runner: CudaRunner, exact: Reference, narrow: Reference) -> None:
    made = asking(lines([70, 33, 64, 50, 17, 2], exact.spec.vocab_size))
    found = all_logits(runner, [line.part(len(line.tokens)) for line in made])
    forget(runner, made)
    wanted = logits(exact, made)
    assert distance(found, wanted) <= NO_WORSE * distance(logits(narrow, made), wanted)
    for line in made:
        line.window = None
    assert distance(found, logits(exact, made)) > 2 * distance(found, wanted), "the windows changed nothing"


def test_decoding_rows_see_as_far_as_their_windows(runner: CudaRunner, exact: Reference, narrow: Reference) -> None:
    for count in (1, 3, 8, 20):
        made = asking(lines([30 + 7 * index % 45 for index in range(count)], exact.spec.vocab_size, seed=count), count)
        prefill(runner, made)
        steps = BLOCK + 2
        found = torch.stack([decode_logits(runner, made)[1] for _ in range(steps)], dim=1).flatten(0, 1)
        forget(runner, made)
        wanted = logits(exact, made, steps)
        assert distance(found, wanted) <= NO_WORSE * distance(logits(narrow, made, steps), wanted), count


def test_a_prompt_with_a_window_may_be_cut_anywhere(runner: CudaRunner, exact: Reference, narrow: Reference) -> None:
    length, window = 2 * BLOCK + 5, 9
    tokens = lines([length], exact.spec.vocab_size, seed=3)[0].tokens
    wanted = exact.logits(tokens, window)
    allowed = NO_WORSE * distance(narrow.logits(tokens, window), wanted)
    for cut in range(1, length):
        line = lines([length], exact.spec.vocab_size, seed=3)[0]
        line.window = window
        pieces = [all_logits(runner, [line.part(size)]) for size in (cut, length - cut)]
        runner.forget(line.key)
        assert distance(torch.cat(pieces), wanted) <= 1.5 * allowed, cut


def test_chunks_beside_decoding_rows_each_with_a_window(
    runner: CudaRunner, exact: Reference, narrow: Reference
) -> None:
    made = asking(lines([40 + index for index in range(7)], exact.spec.vocab_size, seed=5))
    prefill(runner, made)
    late = asking(lines([90, 60, 2], exact.spec.vocab_size, seed=6, keys=100), shift=1)
    for index, line in enumerate(late):
        line.blocks = list(range(160 + 10 * index, 170 + 10 * index))
    found = all_logits(runner, [*(line.part(1) for line in made), *(line.part(len(line.tokens)) for line in late)])
    forget(runner, [*made, *late])

    def of(reference: Reference) -> torch.Tensor:
        rows = [reference.logits(line.tokens, line.window)[-1:] for line in made]
        return torch.cat([*rows, logits(reference, late)])

    wanted = of(exact)
    assert distance(found, wanted) <= 1.5 * NO_WORSE * distance(of(narrow), wanted)


def test_graphs_compute_the_same_bits_as_eager_launches(runner: CudaRunner, exact: Reference) -> None:
    for count in (1, 3, 8, 20):
        made = asking(lines([20 + index for index in range(count)], exact.spec.vocab_size, seed=count, room=20), 1)
        prefill(runner, made)
        eager, replayed = decode_logits(runner, made)
        assert torch.equal(eager, replayed), count
        forget(runner, made)


def test_one_step_ahead_draws_what_lockstep_draws(runner: CudaRunner, exact: Reference) -> None:
    answers: list[list[list[int]]] = []
    for decode in (decode_lockstep, decode_ahead):
        made = asking(lines([5, 16, 31, 47, 2], exact.spec.vocab_size, seed=1, keys=1000 * len(answers)))
        prefill(runner, made)
        decode(runner, made, 2 * BLOCK + 3)
        forget(runner, made)
        answers.append([line.tokens for line in made])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["llama-gqa-untied", "mistral-window"])
def test_windows_over_fp8_keys_and_values_lose_what_rounding_loses(name: str) -> None:
    """Chunks with windows are computed from queries that are not rounded, as the reference's are."""
    model = str(DATA / "tiny" / name)
    exact = Reference(model, torch.float32)
    rounding = Reference(model, torch.bfloat16, torch.float8_e4m3fn)
    with cuda_runner(model, kv_format="fp8") as runner:
        assert runner.card.modules == (Module.ATTENTION_WINDOW,)
        made = asking(lines([70, 33, 64, 50, 17], exact.spec.vocab_size))
        found = all_logits(runner, [line.part(len(line.tokens)) for line in made])
        wanted = logits(exact, made)
        assert distance(found, wanted) <= 1.4 * distance(logits(rounding, made), wanted)
        forget(runner, made)
        made = asking(lines([50 + index for index in range(9)], exact.spec.vocab_size, seed=2))
        prefill(runner, made)
        found = torch.stack([decode_logits(runner, made)[1] for _ in range(BLOCK)], dim=1).flatten(0, 1)
        wanted = logits(exact, made, BLOCK)
        assert distance(found, wanted) <= 1.4 * distance(logits(rounding, made, BLOCK), wanted)
