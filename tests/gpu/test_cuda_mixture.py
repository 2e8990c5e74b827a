"""Experts with e4m3 weights: torch's grouped product for groups of any size, and a whole layer of experts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from baton.engine.cuda.build import build
from baton.engine.cuda.fp8_weights import quantize_channels
from baton.engine.cuda.kernels import E4M3_MAX, Kernels
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.mixture import ExpertWeights, Mixture, _multiply, _Rounded
from baton.engine.cuda.products import Linear
from baton.engine.spec import MoeSpec
from tests.gpu.gpu_engines import DEVICE
from tests.gpu.paged import relative_errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TOLERANCE = 8e-3  # of a product of rounded operands: what is left are sums on tensor cores and one rounding to bf16


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels(CudaLibrary(build()), DEVICE)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(BF16)


def rounded(x: torch.Tensor) -> _Rounded:
    largest = x.float().abs().amax(dim=1)
    return _Rounded((x.float() * (E4M3_MAX / largest)[:, None]).to(E4M3), largest / E4M3_MAX)


def ends(sizes: Sequence[int]) -> torch.Tensor:
    return torch.tensor(sizes, device=DEVICE).cumsum(0).to(torch.int32)


def product(x: _Rounded, by: Linear, sizes: Sequence[int]) -> torch.Tensor:
    assert by.scale is not None
    rows = (x.values.float() * x.scales[:, None]).split(list(sizes))
    weights = by.weight.float() * by.scale[:, :, None]
    return torch.cat([group @ weight.t() for group, weight in zip(rows, weights, strict=True)])


SIZES = ([1] * 8, [0, 1, 3, 0, 17, 5, 0, 2], [0] * 7 + [9], [16, 130, 1, 0, 7, 64, 33, 200], [300] * 8)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes)))
@pytest.mark.parametrize(("n", "k"), [(192, 128), (96, 64), (1536, 2048), (2048, 768)])
def test_groups_of_any_size_are_multiplied_with_their_experts(sizes: list[int], n: int, k: int) -> None:
    values, scale = quantize_channels(normal(8, n, k, seed=1) / k**0.5)
    by = Linear(values, scale=scale)
    spread = torch.logspace(-2, 2, sum(sizes), device=DEVICE).to(BF16)
    x = rounded(normal(sum(sizes), k) * spread[:, None])
    found = _multiply(x, by, ends(sizes))
    assert relative_errors(found, product(x, by, sizes)).max() < TOLERANCE


def test_a_captured_product_follows_the_groups() -> None:
    values, scale = quantize_channels(normal(8, 192, 128, seed=1) / 11)
    by, x, last = Linear(values, scale=scale), rounded(normal(40, 128)), ends([5] * 8)
    _multiply(x, by, last)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _multiply(x, by, last)
    for sizes in ([5] * 8, [0] * 7 + [40], [40] + [0] * 7, [1, 2, 3, 4, 5, 6, 7, 12]):
        last.copy_(ends(sizes))
        graph.replay()
        assert relative_errors(out, product(x, by, sizes)).max() < TOLERANCE, sizes


LAYERS = {"mixtral": (MoeSpec(8, 2, 1024, renormalize=True), 512), "qwen3": (MoeSpec(128, 8, 768, True), 2048)}


def layer(name: str) -> tuple[MoeSpec, ExpertWeights, ExpertWeights]:
    """Experts in bf16, and the same in e4m3."""
    moe, hidden = LAYERS[name]
    router = normal(moe.experts, hidden, seed=3) / hidden**0.5 * 2
    gate_up = normal(moe.experts, 2 * moe.ffn_size, hidden, seed=4) / hidden**0.5
    down = normal(moe.experts, hidden, moe.ffn_size, seed=5) / moe.ffn_size**0.5
    plain = ExpertWeights(router, Linear(gate_up), Linear(down))
    in_fp8 = [Linear(values, scale=scale) for values, scale in map(quantize_channels, (gate_up, down))]
    return moe, plain, ExpertWeights(router, *in_fp8)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rows", [1, 3, 64, 500, 8200])
def test_a_layer_of_experts_loses_what_rounding_loses(kernels: Kernels, name: str, rows: int) -> None:
    """With the most rows a mixture has more (row, expert) pairs than a grid has blocks in one dimension."""
    moe, plain, in_fp8 = layer(name)
    mixture = Mixture(moe, kernels, DEVICE)
    x = normal(rows, in_fp8.router.shape[1])
    exact, found = torch.empty_like(x), torch.empty_like(x)
    mixture.forward(x, plain, exact)
    mixture.forward(x, in_fp8, found)
    errors = relative_errors(found, exact.float())
    # Four operands lose 2.6 % each by rounding, those of gate and up twice over: 6.4 % together.
    assert errors.mean() < 0.08
    assert errors.max() < 0.15


def test_a_captured_layer_gives_the_bits_of_an_eager_one(kernels: Kernels) -> None:
    moe, _, in_fp8 = layer("mixtral")
    mixture = Mixture(moe, kernels, DEVICE)
    x = normal(24, in_fp8.router.shape[1])
    out, eager = torch.empty_like(x), torch.empty_like(x)
    mixture.forward(x, in_fp8, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixture.forward(x, in_fp8, out)
    for seed in range(4):
        x.copy_(normal(*x.shape, seed=seed))
        graph.replay()
        mixture.forward(x, in_fp8, eager)
        assert torch.equal(out, eager)


def test_silu_of_more_rows_than_a_grid_has_blocks_in_one_dimension(kernels: Kernels) -> None:
    gate_up = normal(70_000, 192)
    out = torch.full((70_000, 96), float("nan"), dtype=BF16, device=DEVICE)
    kernels.silu_mul(gate_up, out)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate.float()).to(BF16) * up, rtol=2**-7, atol=1e-6)
