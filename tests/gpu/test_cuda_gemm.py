"""Matrix products on the GPU against float64, by relative error; every output is poisoned first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.engine.cuda.build import build
from baton.engine.cuda.gemm import Gemm
from baton.engine.cuda.gemm_tuner import Family
from baton.engine.cuda.gemv import MAX_ROWS, Epilogue, Gemv, GemvShape, Norm
from baton.engine.cuda.kernels import Overlap
from baton.engine.cuda.library import CudaLibrary

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
TOLERANCE = 4e-3
MANY = 1000  # values over which roundings average out
EPS = 1e-5
# [n, k] of weights: a large and a small model's, and sizes that end inside a tile, a slice of k and a batch of loads.
SIZES = [(6144, 4096), (4096, 14336), (4096, 1024), (1024, 3072), (1002, 1056), (24, 16), (6, 80)]


@pytest.fixture(scope="module")
def library() -> CudaLibrary:
    return CudaLibrary(build())


@pytest.fixture(scope="module", params=list(Overlap), ids=lambda overlap: f"overlap-{overlap.name.lower()}")
def gemv(library: CudaLibrary, request: pytest.FixtureRequest) -> Gemv:
    return Gemv(library, DEVICE, request.param)


@pytest.fixture
def gemm(library: CudaLibrary) -> Iterator[Gemm]:
    with Gemm(library, DEVICE) as gemm:
        yield gemm
        torch.cuda.synchronize()


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(BF16)


def poison(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=BF16, device=DEVICE)


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||; NaN never passes a comparison."""
    return float((out.double() - reference).norm() / reference.norm())


def twice_rounded(product: torch.Tensor, reference: torch.Tensor) -> float:
    """The error allowed when ``product`` and then ``reference`` is rounded to bf16, by up to 2^-8 of the value each.

    Over many values roundings average out to well below TOLERANCE; a few may all be nearly as bad as they can be.
    """
    if reference.numel() >= MANY:
        return TOLERANCE
    return max(TOLERANCE, 2**-8 * float((product.norm() + reference.norm()) / reference.norm()))


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The reference decoder's norm in bf16."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm.eps)
    return (wide * scale).to(BF16) * norm.gain


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and the float32 scale of every row."""
    scale = weight.float().abs().amax(dim=-1) / 448
    return (weight.float() / scale[:, None]).to(E4M3), scale


def silu_mul(products: torch.Tensor) -> torch.Tensor:
    gate, up = products.to(BF16).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).double()


def all_shapes(gemv: Gemv, rows: int, k: int, epilogue: Epilogue, dtype: torch.dtype = BF16) -> list[GemvShape]:
    shapes = gemv.shapes(rows, k, epilogue, dtype)
    assert shapes
    return shapes


# ------------------------------------------------------------------------------------------------------------ few rows


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_few_rows_match_float64_in_every_shape(gemv: Gemv, rows: int, n: int, k: int) -> None:
    x, weight = normal(rows, k), normal(n, k, scale=k**-0.5)
    reference = multiply(x, weight)
    for shape in all_shapes(gemv, rows, k, Epilogue.STORE):
        out = poison(rows, n)
        gemv.run(shape, Epilogue.STORE, x, weight, out)
        assert error(out, reference) < TOLERANCE, shape


@pytest.mark.parametrize("rows", [8, 9, 13, MAX_ROWS])
@pytest.mark.parametrize(("n", "k"), [size for size in SIZES if size[1] <= 4096])
def test_up_to_sixteen_rows_match_float64(gemv: Gemv, rows: int, n: int, k: int) -> None:
    x, weight, bias = normal(rows, k), normal(n, k, scale=k**-0.5), normal(n)
    reference = multiply(x, weight) + bias.double()
    for shape in all_shapes(gemv, rows, k, Epilogue.STORE):
        out = poison(rows, n)
        gemv.run(shape, Epilogue.STORE, x, weight, out, bias)
        assert error(out, reference) < TOLERANCE, shape


@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_a_product_is_added_to_the_residual(gemv: Gemv, rows: int, n: int, k: int) -> None:
    x, weight, bias, residual = normal(rows, k), normal(n, k, scale=k**-0.5), normal(n), normal(rows, n)
    product = multiply(x, weight) + bias.double()
    reference = residual.double() + product
    for shape in all_shapes(gemv, rows, k, Epilogue.ADD):
        out = residual.clone()
        gemv.run(shape, Epilogue.ADD, x, weight, out, bias)
        assert error(out, reference) < twice_rounded(product, reference), shape


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize(("n", "k"), [size for size in SIZES if size[1] <= 4096])
def test_a_norm_before_the_product(gemv: Gemv, rows: int, n: int, k: int) -> None:
    x, weight = normal(rows, k, scale=3), normal(n, k, scale=k**-0.5)
    norm = Norm(1 + normal(k, scale=0.3), EPS)
    reference = multiply(normed(x, norm), weight)
    for shape in all_shapes(gemv, rows, k, Epilogue.STORE):
        out = poison(rows, n)
        gemv.run(shape, Epilogue.STORE, x, weight, out, norm=norm)
        assert error(out, reference) < TOLERANCE, shape


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize(("ffn", "k"), [(14336, 4096), (3072, 1024), (501, 1056), (3, 80)])
def test_gate_and_up_become_one_activation(gemv: Gemv, rows: int, ffn: int, k: int) -> None:
    x, weight, bias = normal(rows, k), normal(2 * ffn, k, scale=k**-0.5), normal(2 * ffn, scale=0.5)
    norm = Norm(1 + normal(k, scale=0.3), EPS)
    product = multiply(normed(x, norm), weight).to(BF16) + bias
    for shape in all_shapes(gemv, rows, k, Epilogue.SILU_MUL):
        out = poison(rows, ffn)
        gemv.run(shape, Epilogue.SILU_MUL, x, weight, out, bias, norm=norm)
        assert error(out, silu_mul(product)) < 2 * TOLERANCE, shape


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (1024, 3072), (1002, 1056), (6, 80)])
def test_e4m3_weights_are_read_exactly(gemv: Gemv, rows: int, n: int, k: int) -> None:
    x, (weight, scale) = normal(rows, k), quantised(normal(n, k, scale=k**-0.5))
    reference = multiply(x, weight.double() * scale[:, None].double())
    for shape in all_shapes(gemv, rows, k, Epilogue.STORE, E4M3):
        out = poison(rows, n)
        gemv.run(shape, Epilogue.STORE, x, weight, out, weight_scale=scale)
        assert error(out, reference) < TOLERANCE, shape


def test_every_e4m3_value_is_read_exactly(gemv: Gemv) -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device=DEVICE)
    weight = torch.zeros(len(codes), 64, dtype=torch.uint8, device=DEVICE)
    weight[:, 17] = codes
    x = torch.zeros(1, 64, dtype=BF16, device=DEVICE)
    x[0, 17] = 1
    out = poison(1, len(codes))
    shape = all_shapes(gemv, 1, 64, Epilogue.STORE, E4M3)[0]
    scale = torch.ones(len(codes), device=DEVICE)
    gemv.run(shape, Epilogue.STORE, x, weight.view(E4M3), out, weight_scale=scale)
    assert torch.equal(out[0].float(), codes.view(E4M3).float())


def test_a_row_does_not_depend_on_the_others(gemv: Gemv) -> None:
    x, weight = normal(7, 4096), normal(1024, 4096, scale=1 / 64)
    for shape in all_shapes(gemv, 7, 4096, Epilogue.STORE):
        together, alone = poison(7, 1024), poison(1, 1024)
        gemv.run(shape, Epilogue.STORE, x, weight, together)
        gemv.run(shape, Epilogue.STORE, x[4:5], weight, alone)
        assert torch.equal(together[4:5], alone), shape


def test_a_chain_of_products_reads_what_the_one_before_wrote(gemv: Gemv) -> None:
    """The launches overlap: a kernel that did not wait would read the last round's values."""
    square = [normal(1024, 1024, scale=1 / 32) for _ in range(8)]
    shape = all_shapes(gemv, 1, 1024, Epilogue.STORE)[0]
    buffers = [poison(1, 1024) for _ in range(2)]
    for _ in range(20):
        start = normal(1, 1024)
        expected = start
        buffers[0].copy_(start)
        for index, weight in enumerate(square):
            gemv.run(shape, Epilogue.STORE, buffers[index % 2], weight, buffers[(index + 1) % 2])
            expected = multiply(expected, weight).to(BF16)
        assert error(buffers[0], expected.double()) < 5 * TOLERANCE


def test_rows_that_do_not_fit_on_the_chip_have_no_shape(gemv: Gemv) -> None:
    assert gemv.shapes(MAX_ROWS + 1, 1024, Epilogue.STORE, BF16) == []
    assert gemv.shapes(16, 14336, Epilogue.STORE, BF16) == []
    assert gemv.shapes(1, 1028, Epilogue.STORE, BF16) == []
    assert gemv.shapes(1, 1032, Epilogue.STORE, E4M3) == []


# ------------------------------------------------------------------------------------------------------------ any rows


@pytest.mark.parametrize("rows", [1, 3, 17, 64, 129, 1000])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (1024, 3072), (1000, 1056)])
def test_linear_matches_float64_before_any_tuning(gemm: Gemm, rows: int, n: int, k: int) -> None:
    x, weight, bias = normal(rows, k), normal(n, k, scale=k**-0.5), normal(n)
    for term in (None, bias):
        out = poison(rows, n)
        gemm.linear(x, weight, out, term)
        reference = multiply(x, weight) if term is None else multiply(x, weight) + term.double()
        assert error(out, reference) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 16, 33, 256])
def test_fp8_products_take_a_scale_for_every_row_and_channel(gemm: Gemm, rows: int) -> None:
    n, k = 1536, 2048
    spread = torch.logspace(-2, 2, rows, device=DEVICE)[:, None].to(BF16)
    (x, x_scale), (weight, weight_scale) = quantised(normal(rows, k) * spread), quantised(normal(n, k, scale=k**-0.5))
    out = poison(rows, n)
    gemm.linear_fp8(x, x_scale, weight, weight_scale, out)
    exact = multiply(x, weight) * x_scale[:, None].double() * weight_scale[None, :].double()
    relative = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(relative.max()) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 4, 16, 40, 64, 100])
def test_tuned_products_match_float64(gemm: Gemm, rows: int) -> None:
    n, k = 1536, 1024
    weights = tuple(normal(n, k, scale=k**-0.5) for _ in range(3))
    gemm.tune([Family(weights)], rows=(1, 4, 16, 64))
    x, out = normal(rows, k), poison(rows, n)
    gemm.linear(x, weights[1], out)
    assert error(out, multiply(x, weights[1])) < TOLERANCE


def test_tuned_fp8_products_match_float64(gemm: Gemm) -> None:
    pairs = [quantised(normal(1024, 1024, scale=1 / 32)) for _ in range(3)]
    weights, scales = tuple(weight for weight, _ in pairs), tuple(scale for _, scale in pairs)
    gemm.tune([Family(weights, scales)], rows=(1, 32))
    (x, x_scale), out = quantised(normal(20, 1024)), poison(20, 1024)
    gemm.linear_fp8(x, x_scale, weights[2], scales[2], out)
    exact = multiply(x, weights[2]) * x_scale[:, None].double() * scales[2][None, :].double()
    assert error(out, exact) < TOLERANCE


def test_measurements_are_kept_between_processes(gemm: Gemm, library: CudaLibrary, tmp_path: Path) -> None:
    family = Family((normal(256, 512),), epilogue=Epilogue.ADD)
    cache = tmp_path / "choices.json"
    gemm.tune([family], rows=(1, 32), cache=cache)
    assert gemm.choices.products
    assert gemm.choices.fused
    with Gemm(library, DEVICE) as later:
        written = cache.stat().st_mtime_ns
        later.tune([family], rows=(1, 32), cache=cache)
        assert later.choices.way(family.product, 1) is not None
        assert later.choices.products.keys() == gemm.choices.products.keys()
        assert cache.stat().st_mtime_ns == written


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"device": "other", "cublaslt": 1}'])
def test_a_damaged_or_foreign_cache_is_measured_again(gemm: Gemm, tmp_path: Path, content: str) -> None:
    cache = tmp_path / "choices.json"
    cache.write_text(content)
    family = Family((normal(256, 512),))
    gemm.tune([family], rows=(32,), cache=cache)
    assert gemm.choices.way(family.product, 32) is not None


@pytest.mark.parametrize("rows", [1, 4])
def test_a_captured_layer_equals_an_eager_one(gemm: Gemm, rows: int) -> None:
    hidden, ffn = 1024, 3072
    qkv, output = normal(4096, hidden, scale=1 / 32), normal(hidden, 2048, scale=1 / 45)
    gate_up, down = normal(2 * ffn, hidden, scale=1 / 32), normal(hidden, ffn, scale=1 / 55)
    norm = Norm(1 + normal(hidden, scale=0.1), EPS)
    start = normal(rows, hidden)
    residual, projected, gated = poison(rows, hidden), poison(rows, 4096), poison(rows, ffn)

    def layer() -> None:
        gemm.norm_linear(residual, norm, qkv, projected)
        gemm.linear_add(projected[:, :2048].contiguous(), output, residual)
        gemm.norm_gate_up_silu(residual, norm, gate_up, gated)
        gemm.linear_add(gated, down, residual)

    residual.copy_(start)
    layer()
    eager = residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for _ in range(5):
        residual.copy_(start)
        graph.replay()
        assert torch.equal(residual, eager)

    expected = multiply(normed(start, norm), qkv).to(BF16)
    after = start + multiply(expected[:, :2048], output).to(BF16)
    activation = silu_mul(multiply(normed(after, norm), gate_up)).to(BF16)
    after = after + multiply(activation, down).to(BF16)
    assert error(eager, after.double()) < 2 * TOLERANCE


def test_a_product_without_a_kernel_is_refused_by_name(gemm: Gemm) -> None:
    with pytest.raises(ValueError, match="rows: no kernel multiplies 17 rows"):
        gemm.linear_add(normal(17, 64), normal(8, 64), normal(17, 8))
