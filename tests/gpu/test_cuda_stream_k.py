"""The matrix products with evenly cut work against float64; every output is poisoned first."""

from __future__ import annotations

import pytest
import torch

from baton.engine.cuda.build import build
from baton.engine.cuda.gemm import Gemm
from baton.engine.cuda.gemm_tuner import Family
from baton.engine.cuda.kernels import Overlap
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.stream_k import StreamK

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
TOLERANCE = 4e-3
FP8_TOLERANCE = 6e-3  # the tensor cores keep some 14 bits of a sum of e4m3 products
# [n, k]: tiles cut into many parts, into few, whole tiles, and sizes that end inside a tile or a step of k.
SIZES = [(6144, 4096), (4096, 14336), (28672, 1024), (1024, 3072), (1000, 1032), (24, 72), (128, 64)]


@pytest.fixture(scope="module", params=list(Overlap), ids=lambda overlap: f"overlap-{overlap.name.lower()}")
def stream_k(request: pytest.FixtureRequest) -> StreamK:
    return StreamK(CudaLibrary(build()), DEVICE, request.param)


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(BF16)


def quantised(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and the float32 scale of every row."""
    scale = matrix.float().abs().amax(dim=-1) / 448
    return (matrix.float() / scale[:, None]).to(E4M3), scale


def poison(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=BF16, device=DEVICE)


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()


@pytest.mark.parametrize("rows", [17, 32, 40, 64, 100, 128, 192, 250, 256, 300, 1000])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_products_match_float64_in_every_shape(stream_k: StreamK, rows: int, n: int, k: int) -> None:
    x, weight, bias = normal(rows, k), normal(n, k, scale=k**-0.5), normal(n)
    reference = multiply(x, weight)
    shapes = stream_k.shapes(rows, n, k)
    assert shapes
    for shape in shapes:
        out, with_bias = poison(rows, n), poison(rows, n)
        stream_k.run(shape, x, weight, out)
        stream_k.run(shape, x, weight, with_bias, bias)
        assert error(out, reference) < TOLERANCE, shape
        assert error(with_bias, reference + bias.double()) < TOLERANCE, shape


@pytest.mark.parametrize("rows", [17, 32, 40, 64, 100, 128, 192, 256, 300])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (28672, 1024), (1000, 1040), (24, 80), (128, 64)])
def test_e4m3_products_take_a_scale_for_every_row_and_channel(stream_k: StreamK, rows: int, n: int, k: int) -> None:
    spread = torch.logspace(-2, 2, rows, device=DEVICE)[:, None].to(BF16)
    (x, x_scale), (weight, weight_scale) = quantised(normal(rows, k) * spread), quantised(normal(n, k, scale=k**-0.5))
    bias = normal(n)
    exact = multiply(x, weight) * x_scale[:, None].double() * weight_scale[None, :].double()
    shapes = stream_k.shapes(rows, n, k, E4M3)
    assert shapes
    for shape in shapes:
        out, with_bias = poison(rows, n), poison(rows, n)
        stream_k.run(shape, x, weight, out, None, x_scale, weight_scale)
        stream_k.run(shape, x, weight, with_bias, bias, x_scale, weight_scale)
        assert float(((out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max()) < FP8_TOLERANCE, shape
        assert error(with_bias, exact + bias.double()) < FP8_TOLERANCE, shape


def test_repeated_products_have_the_same_bits(stream_k: StreamK) -> None:
    """The parts of a tile are added in their order, whichever is ready first; and the workspace is left clean."""
    x, weight = normal(200, 4096), normal(4096, 4096, scale=1 / 64)
    for shape in stream_k.shapes(200, 4096, 4096):
        first = poison(200, 4096)
        stream_k.run(shape, x, weight, first)
        for _ in range(50):
            again = poison(200, 4096)
            stream_k.run(shape, x, weight, again)
            assert torch.equal(first, again), shape


def test_a_captured_chain_reads_what_the_product_before_wrote(stream_k: StreamK) -> None:
    """The launches overlap: a kernel that did not wait would read the last round's values."""
    square = [normal(1024, 1024, scale=1 / 32) for _ in range(6)]
    for rows in (48, 200):
        for shape in stream_k.shapes(rows, 1024, 1024):
            start, buffers = normal(rows, 1024), [poison(rows, 1024) for _ in range(2)]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for index, weight in enumerate(square):
                    stream_k.run(shape, buffers[index % 2], weight, buffers[(index + 1) % 2])
            expected = start
            for weight in square:
                expected = multiply(expected, weight).to(BF16)
            for _ in range(5):
                buffers[0].copy_(start)
                graph.replay()
                assert error(buffers[0], expected.double()) < 5 * TOLERANCE, shape


def test_tuning_may_take_it() -> None:
    library = CudaLibrary(build())
    weights = tuple(normal(4096, 4096, scale=1 / 64) for _ in range(3))
    with Gemm(library, DEVICE, stream_k=StreamK(library, DEVICE)) as gemm:
        gemm.tune([Family(weights)], rows=(64, 192))
        for rows in (40, 64, 192):
            x, out = normal(rows, 4096), poison(rows, 4096)
            gemm.linear(x, weights[2], out)
            assert error(out, multiply(x, weights[2])) < TOLERANCE
        torch.cuda.synchronize()


def test_tuning_may_take_it_for_e4m3() -> None:
    library = CudaLibrary(build())
    pairs = [quantised(normal(4096, 4096, scale=1 / 64)) for _ in range(3)]
    weights, scales = tuple(weight for weight, _ in pairs), tuple(scale for _, scale in pairs)
    with Gemm(library, DEVICE, stream_k=StreamK(library, DEVICE)) as gemm:
        gemm.tune([Family(weights, scales)], rows=(64, 192))
        for rows in (40, 64, 192):
            (x, x_scale), out = quantised(normal(rows, 4096)), poison(rows, 4096)
            gemm.linear_fp8(x, x_scale, weights[2], scales[2], out)
            exact = multiply(x, weights[2]) * x_scale[:, None].double() * scales[2][None, :].double()
            assert error(out, exact) < FP8_TOLERANCE
        torch.cuda.synchronize()


def test_sizes_that_the_copies_cannot_take_have_no_shape(stream_k: StreamK) -> None:
    assert stream_k.shapes(64, 1004, 1024) == []
    assert stream_k.shapes(64, 1024, 1004) == []
    assert stream_k.shapes(64, 1024, 1032, E4M3) == []
    assert stream_k.shapes(8, 1024, 1024) == []
