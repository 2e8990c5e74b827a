"""The matrix products of 17 to 128 rows against float64, in every shape; every output is poisoned first."""

from __future__ import annotations

import pytest
import torch

from baton.engine.cuda.build import build
from baton.engine.cuda.gemm import Gemm
from baton.engine.cuda.gemm_tuner import Family
from baton.engine.cuda.kernels import Overlap
from baton.engine.cuda.library import CudaFailed, CudaLibrary
from baton.engine.cuda.mid_rows import MidRows, MidRowsShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
TOLERANCE = 4e-3
FP8_TOLERANCE = 6e-3  # the tensor cores keep some 14 bits of a sum of e4m3 products
ROWS = [17, 24, 32, 33, 64, 65, 96, 97, 127, 128]
# [n, k]: large and small models' products, and sizes that end inside a tile, a pair of tiles or a unit of k.
SIZES = [(6144, 4096), (4096, 14336), (1024, 3072), (1000, 1040), (136, 528), (24, 80), (128, 128)]


@pytest.fixture(scope="module")
def library() -> CudaLibrary:
    return CudaLibrary(build())


@pytest.fixture(scope="module", params=list(Overlap), ids=lambda overlap: f"overlap-{overlap.name.lower()}")
def mid_rows(library: CudaLibrary, request: pytest.FixtureRequest) -> MidRows:
    return MidRows(library, DEVICE, request.param)


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(BF16)


def quantised(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and the float32 scale of every row."""
    scale = matrix.float().abs().amax(dim=-1) / 448
    return (matrix.float() / scale[:, None]).to(E4M3), scale


def poison(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=BF16, device=DEVICE)


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||; NaN never passes a comparison."""
    return float((out.double() - reference).norm() / reference.norm())


def worst_row(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float(((out.double() - reference).norm(dim=-1) / reference.norm(dim=-1)).max())


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()


def all_shapes(mid_rows: MidRows, rows: int, n: int, k: int, dtype: torch.dtype = BF16) -> list[MidRowsShape]:
    """Every compiled cut for so many rows, with k shared in every way that a cluster allows."""
    cuts = {shape.cut for shape in mid_rows.shapes(rows, n, k, dtype)}
    units = -(-k * dtype.itemsize // 128)
    shapes = [MidRowsShape(cut, splits) for cut in cuts for splits in range(1, min(8 // cut.pair, units) + 1)]
    assert len(cuts) >= 3
    return shapes


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_products_match_float64_in_every_shape(mid_rows: MidRows, rows: int, n: int, k: int) -> None:
    x, weight, bias = normal(rows, k), normal(n, k, scale=k**-0.5), normal(n)
    reference = multiply(x, weight)
    for shape in all_shapes(mid_rows, rows, n, k):
        out, with_bias = poison(rows, n), poison(rows, n)
        mid_rows.run(shape, x, weight, out)
        mid_rows.run(shape, x, weight, with_bias, bias)
        assert error(out, reference) < TOLERANCE, shape
        assert error(with_bias, reference + bias.double()) < TOLERANCE, shape


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_e4m3_products_take_a_scale_for_every_row_and_channel(mid_rows: MidRows, rows: int, n: int, k: int) -> None:
    spread = torch.logspace(-2, 2, rows, device=DEVICE)[:, None].to(BF16)
    (x, x_scale), (weight, weight_scale) = quantised(normal(rows, k) * spread), quantised(normal(n, k, scale=k**-0.5))
    weight_scale *= torch.logspace(-1, 1, n, device=DEVICE)
    bias = normal(n)
    exact = multiply(x, weight) * x_scale[:, None].double() * weight_scale[None, :].double()
    for shape in all_shapes(mid_rows, rows, n, k, E4M3):
        out, with_bias = poison(rows, n), poison(rows, n)
        mid_rows.run(shape, x, weight, out, None, x_scale, weight_scale)
        mid_rows.run(shape, x, weight, with_bias, bias, x_scale, weight_scale)
        assert worst_row(out, exact) < FP8_TOLERANCE, shape
        assert worst_row(with_bias, exact + bias.double()) < FP8_TOLERANCE, shape


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_products_of_small_whole_numbers_are_exact(mid_rows: MidRows, dtype: torch.dtype) -> None:
    """Sums that every format holds exactly: one value in the wrong place or counted twice is seen."""
    rows, n, k = 50, 328, 656
    x = torch.randint(-1, 2, (rows, k), device=DEVICE).to(BF16)
    weight = torch.randint(-1, 2, (n, k), device=DEVICE).to(BF16)
    exact = multiply(x, weight)
    assert float(exact.abs().max()) <= 256
    scales = (torch.ones(rows, device=DEVICE), torch.ones(n, device=DEVICE)) if dtype is E4M3 else (None, None)
    for shape in all_shapes(mid_rows, rows, n, k, dtype):
        out = poison(rows, n)
        mid_rows.run(shape, x.to(dtype), weight.to(dtype), out, None, *scales)
        assert torch.equal(out.double(), exact), shape


@pytest.mark.parametrize("rows", [40, 128])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_repeated_products_have_the_same_bits(mid_rows: MidRows, rows: int, dtype: torch.dtype) -> None:
    """The parts of a tile are added in their order, whichever is ready first."""
    n, k = 2048, 4096
    (x, x_scale), (weight, weight_scale) = quantised(normal(rows, k)), quantised(normal(n, k, scale=1 / 64))
    x, weight = (x, weight) if dtype is E4M3 else (x.to(BF16), weight.to(BF16))
    for shape in all_shapes(mid_rows, rows, n, k, dtype):
        first = poison(rows, n)
        mid_rows.run(shape, x, weight, first, None, x_scale, weight_scale)
        for _ in range(20):
            again = poison(rows, n)
            mid_rows.run(shape, x, weight, again, None, x_scale, weight_scale)
            assert torch.equal(first, again), shape


@pytest.mark.parametrize("rows", [20, 48, 90, 128])
def test_a_captured_chain_reads_what_the_product_before_wrote(mid_rows: MidRows, rows: int) -> None:
    """The launches overlap: a kernel that did not wait would read the last round's values."""
    square = [normal(1024, 1024, scale=1 / 32) for _ in range(6)]
    for shape in all_shapes(mid_rows, rows, 1024, 1024):
        start, buffers = normal(rows, 1024), [poison(rows, 1024) for _ in range(2)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index, weight in enumerate(square):
                mid_rows.run(shape, buffers[index % 2], weight, buffers[(index + 1) % 2])
        expected = start
        for weight in square:
            expected = multiply(expected, weight).to(BF16)
        for _ in range(5):
            buffers[0].copy_(start)
            graph.replay()
            assert error(buffers[0], expected.double()) < 5 * TOLERANCE, shape


def test_nothing_is_written_beyond_the_last_row(mid_rows: MidRows) -> None:
    rows, n, k = 37, 1000, 528
    x, weight = normal(rows, k), normal(n, k, scale=k**-0.5)
    for shape in all_shapes(mid_rows, rows, n, k):
        larger = poison(rows + 8, n)
        mid_rows.run(shape, x, weight, larger[:rows])
        assert not larger[:rows].isnan().any(), shape
        assert larger[rows:].isnan().all(), shape


def test_rows_next_to_the_operands_are_not_read(mid_rows: MidRows) -> None:
    """What lies past the last row counts as zero, be it infinite."""
    rows, n, k = 37, 72, 520
    x, weight = normal(rows + 40, k), normal(n + 200, k, scale=k**-0.5)
    x[rows:], weight[n:] = float("inf"), float("nan")
    reference = multiply(x[:rows], weight[:n])
    for shape in all_shapes(mid_rows, rows, n, k):
        out = poison(rows, n)
        mid_rows.run(shape, x[:rows], weight[:n], out)
        assert error(out, reference) < TOLERANCE, shape


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_tuning_may_take_it(library: CudaLibrary, kind: str) -> None:
    pairs = [quantised(normal(4096, 4096, scale=1 / 64)) for _ in range(4)]
    scales = tuple(scale for _, scale in pairs) if kind == "e4m3" else ()
    weights = tuple(weight if scales else weight.to(BF16) for weight, _ in pairs)
    with Gemm(library, DEVICE, mid_rows=MidRows(library, DEVICE)) as gemm:
        gemm.tune([Family(weights, scales)], rows=(32, 64, 128))
        for rows in (20, 40, 64, 100, 192):
            (x, x_scale), out = quantised(normal(rows, 4096)), poison(rows, 4096)
            exact = multiply(x, weights[2])
            if scales:
                gemm.linear_fp8(x, x_scale, weights[2], scales[2], out)
                exact = exact * x_scale[:, None].double() * scales[2][None, :].double()
            else:
                gemm.linear(x.to(BF16), weights[2], out)
            assert error(out, exact) < FP8_TOLERANCE
        torch.cuda.synchronize()


def test_sizes_that_the_copies_cannot_take_have_no_shape(mid_rows: MidRows) -> None:
    assert mid_rows.shapes(64, 1004, 1024, BF16) == []
    assert mid_rows.shapes(64, 1024, 1004, BF16) == []
    assert mid_rows.shapes(64, 1024, 1032, E4M3) == []
    assert mid_rows.shapes(16, 1024, 1024, BF16) == []
    assert mid_rows.shapes(129, 1024, 1024, BF16) == []


def test_a_shape_that_does_not_suit_is_refused(mid_rows: MidRows) -> None:
    narrow = mid_rows.shapes(32, 1024, 1024, BF16)[0]
    with pytest.raises(CudaFailed):
        mid_rows.run(narrow, normal(64, 1024), normal(1024, 1024), poison(64, 1024))
    with pytest.raises(CudaFailed):
        mid_rows.run(MidRowsShape(narrow.cut, 9), normal(32, 1024), normal(1024, 1024), poison(32, 1024))
