"""The row-wise kernels against torch, with the reference decoder's rounding points."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from baton.engine.cuda.build import build
from baton.engine.cuda.kernels import E4M3_MAX, Kernels, Overlap
from baton.engine.cuda.library import CudaFailed, CudaLibrary
from baton.engine.spec import DecoderSpec
from tests.gpu.row_references import (
    BF16,
    DEVICE,
    E4M3,
    EPS,
    LLAMA_8B,
    QWEN3,
    ROWS,
    SMOLLM2,
    SPECS,
    RopeStep,
    as_e4m3,
    assert_nearly_all_equal,
    ints,
    normal,
    normed,
    poison,
    quotient,
    row_maxima,
    same_bits,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def library() -> CudaLibrary:
    return CudaLibrary(build())


@pytest.fixture(scope="module", params=list(Overlap), ids=lambda overlap: f"overlap-{overlap.name.lower()}")
def kernels(library: CudaLibrary, request: pytest.FixtureRequest) -> Kernels:
    return Kernels(library, DEVICE, request.param)


# ------------------------------------------------------------------------------------------------------ rows by index


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", [128, 576, 4096])
def test_a_row_takes_the_drawn_token_where_it_names_a_source(kernels: Kernels, rows: int, hidden: int) -> None:
    vocabulary, drawn_rows = 1000, 64
    table = normal(vocabulary, hidden)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (rows,), generator=generator)
    drawn = torch.randint(vocabulary, (drawn_rows,), generator=generator)
    sources = torch.randint(-drawn_rows, drawn_rows, (rows,), generator=generator)
    out = poison(rows, hidden)
    kernels.embed(ints(tokens), ints(sources), ints(drawn), table, out)
    expected = table[torch.where(sources >= 0, drawn[sources.clamp(min=0)], tokens).to(DEVICE)]
    assert same_bits(out, expected)


def test_a_token_outside_the_vocabulary_spoils_its_row_alone(kernels: Kernels) -> None:
    table = normal(50, 256)
    out = torch.zeros(4, 256, dtype=BF16, device=DEVICE)
    kernels.embed(ints([3, -1, 50, 49]), ints([-1, -1, -1, -1]), ints([0]), table, out)
    assert out[1:3].isnan().all()
    assert same_bits(out[[0, 3]], table[[3, 49]])


@pytest.mark.parametrize("count", [1, 5, 300])
def test_gathered_rows_are_copies(kernels: Kernels, count: int) -> None:
    x = normal(513, 1024)
    rows = torch.randint(513, (count,), generator=torch.Generator().manual_seed(2))
    out = poison(count, 1024)
    kernels.gather_rows(x, ints(rows), out)
    assert same_bits(out, x[rows.to(DEVICE)])


# --------------------------------------------------------------------------------------------------------------- norm


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", [64, 192, 576, 1024, 2880, 4096, 5120, 8192])
def test_add_norm_rounds_as_the_reference(kernels: Kernels, rows: int, hidden: int) -> None:
    x, residual, weight = normal(rows, hidden), normal(rows, hidden, seed=1, scale=3.0), normal(hidden, seed=2)
    expected_residual = residual + x
    out = poison(rows, hidden)
    kernels.add_norm(x, residual, weight, EPS, out)
    assert same_bits(residual, expected_residual)
    assert_nearly_all_equal(out, normed(expected_residual, weight))


@pytest.mark.parametrize("hidden", [576, 4096, 16_384])
def test_add_norm_of_the_residual_alone_leaves_it(kernels: Kernels, hidden: int) -> None:
    residual, weight = normal(5, hidden), normal(hidden, seed=1)
    before = residual.clone()
    out = poison(5, hidden)
    kernels.add_norm(None, residual, weight, EPS, out)
    assert same_bits(residual, before)
    assert_nearly_all_equal(out, normed(before, weight))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", [192, 1024, 4096, 8192])
def test_quantized_norm_is_the_norm_by_its_own_scale(kernels: Kernels, rows: int, hidden: int) -> None:
    x, residual, weight = normal(rows, hidden), normal(rows, hidden, seed=1), normal(hidden, seed=2)
    plain, plain_residual = poison(rows, hidden), residual.clone()
    kernels.add_norm(x, plain_residual, weight, EPS, plain)
    out, scales = poison(rows, hidden, dtype=E4M3), poison(rows, dtype=torch.float32)
    kernels.add_norm_quant(x, residual, weight, EPS, out, scales)
    largest = row_maxima(plain)
    assert same_bits(residual, plain_residual)
    assert same_bits(scales, quotient(largest, E4M3_MAX)[:, 0])
    assert same_bits(out, as_e4m3(plain, quotient(E4M3_MAX, largest)))


def test_a_row_of_zeros_quantizes_to_zeros(kernels: Kernels) -> None:
    zeros, weight = torch.zeros(2, 512, dtype=BF16, device=DEVICE), normal(512)
    out, scales = poison(2, 512, dtype=E4M3), poison(2, dtype=torch.float32)
    kernels.add_norm_quant(None, zeros, weight, EPS, out, scales)
    assert (out.float() == 0).all()
    assert ((scales > 0) & scales.isfinite()).all()


# --------------------------------------------------------------------------------------------------------- activation


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.double()).to(BF16) * up


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("ffn", [96, 1536, 3072, 14_336])
def test_silu_mul_rounds_as_the_reference(kernels: Kernels, rows: int, ffn: int) -> None:
    gate_up = normal(rows, 2 * ffn, scale=4.0)
    out = poison(rows, ffn)
    kernels.silu_mul(gate_up, out)
    assert_nearly_all_equal(out, silu_mul(gate_up))


def test_silu_mul_of_huge_gates_stays_finite(kernels: Kernels) -> None:
    gates = [-1e30, -300.0, -100.0, -88.0, -20.0, -0.0, 0.0, 20.0, 88.0, 100.0, 300.0, 1e30, 1.0, -1.0, 0.5, -0.5]
    gate_up = torch.tensor([[*gates, *[1.5] * 16]], device=DEVICE).to(BF16)
    out = poison(1, 16)
    kernels.silu_mul(gate_up, out)
    torch.testing.assert_close(out, silu_mul(gate_up), rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("ffn", [96, 1536, 3072, 14_336])
def test_quantized_silu_mul_is_silu_mul_by_its_own_scale(kernels: Kernels, rows: int, ffn: int) -> None:
    gate_up = normal(rows, 2 * ffn, scale=4.0)
    plain, out, scales = poison(rows, ffn), poison(rows, ffn, dtype=E4M3), poison(rows, dtype=torch.float32)
    kernels.silu_mul(gate_up, plain)
    kernels.silu_mul_quant(gate_up, out, scales)
    largest = row_maxima(plain)
    assert same_bits(scales, quotient(largest, E4M3_MAX)[:, 0])
    assert same_bits(out, as_e4m3(plain, quotient(E4M3_MAX, largest)))


# ------------------------------------------------------------------------------------------------- rope and the cache


def assert_rotated(step: RopeStep, out: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit-equal without a norm; with one, a flipped rounding before the rotation may move both of a pair."""
    if not step.spec.qk_norm:
        assert same_bits(out, expected)
        return
    low, high = expected.float().abs().chunk(2, dim=-1)
    reach = (low + high).repeat(1, 1, 2)
    assert ((out.float() - expected.float()).abs() <= 2**-6 * reach).all()
    assert float((out != expected).float().mean()) < 4e-3


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.heads}x{spec.kv_heads}x{spec.head_dim}")
def test_rope_append_rotates_in_place_and_fills_the_cache(kernels: Kernels, spec: DecoderSpec, rows: int) -> None:
    step = RopeStep.random(spec, rows, block_size=16)
    qkv, pool, kept = step.qkv.clone(), step.pool(BF16), step.kept()
    step.append(kernels, qkv, pool)
    assert_rotated(step, qkv[kept, : spec.q_size].unflatten(-1, (-1, spec.head_dim)), step.expected("q")[kept])
    assert_rotated(step, step.cached(pool, side=0), step.expected("k")[kept])
    assert same_bits(step.cached(pool, side=1), step.expected("v")[kept])


@pytest.mark.parametrize("block_size", [1, 16, 24, 64])
def test_rope_append_writes_its_slots_and_nothing_else(kernels: Kernels, block_size: int) -> None:
    step = RopeStep.random(SMOLLM2, 77, block_size)
    qkv, pool, kept = step.qkv.clone(), step.pool(BF16), step.kept()
    step.append(kernels, qkv, pool)
    assert same_bits(qkv[~kept], step.qkv[~kept])
    assert same_bits(qkv[:, SMOLLM2.q_size :], step.qkv[:, SMOLLM2.q_size :])
    written = ~pool.isnan()
    slots = step.slots[kept].long()
    expected = torch.zeros_like(written)
    expected[slots // block_size, step.layer, :, :, slots % block_size] = True
    assert torch.equal(written, expected)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("spec", [LLAMA_8B, QWEN3, SMOLLM2], ids=["8b", "0.6b", "135m"])
def test_an_e4m3_cache_holds_what_the_bf16_one_does_by_scale(kernels: Kernels, spec: DecoderSpec, rows: int) -> None:
    step = RopeStep.random(spec, rows, block_size=16)
    k_scale, v_scale = 0.05, 1e-3  # v / 1e-3 is clipped
    plain_qkv, plain_pool = step.qkv.clone(), step.pool(BF16)
    step.append(kernels, plain_qkv, plain_pool)
    qkv, pool = step.qkv.clone(), step.pool(E4M3)
    inputs = (step.positions, step.slots, step.cos, step.sin, spec, step.q_norm, step.k_norm)
    kernels.rope_append_quant(qkv, *inputs, pool, step.layer, k_scale, v_scale)
    assert same_bits(qkv, plain_qkv)
    for side, scale in enumerate((k_scale, v_scale)):
        factor = torch.tensor(1.0 / scale, dtype=torch.float32, device=DEVICE)
        assert same_bits(step.cached(pool, side), as_e4m3(step.cached(plain_pool, side), factor))


# ------------------------------------------------------------------------------------------------------ what all keep


def run_all(kernels: Kernels, x: torch.Tensor, step: RopeStep, rows: slice) -> list[torch.Tensor]:
    """Every kernel whose rows do arithmetic, on some of the rows."""
    x = x[rows].clone()
    count, width = x.shape
    weight = normal(width, seed=9)
    normed_out, normed_e4m3 = poison(count, width), poison(count, width, dtype=E4M3)
    activated, activated_e4m3 = poison(count, width // 2), poison(count, width // 2, dtype=E4M3)
    scales, more_scales = poison(count, dtype=torch.float32), poison(count, dtype=torch.float32)
    kernels.add_norm(x, x.clone(), weight, EPS, normed_out)
    kernels.add_norm_quant(x, x.clone(), weight, EPS, normed_e4m3, scales)
    kernels.silu_mul(x, activated)
    kernels.silu_mul_quant(x, activated_e4m3, more_scales)
    part = replace(step, positions=step.positions[rows].clone(), slots=step.slots[rows].clone())
    qkv = step.qkv[rows].clone()
    part.append(kernels, qkv, step.pool(BF16))
    return [normed_out, normed_e4m3, scales, activated, activated_e4m3, more_scales, qkv]


@pytest.mark.parametrize("width", [512, 4096])
def test_rows_do_not_depend_on_the_batch(kernels: Kernels, width: int) -> None:
    rows = 300
    x, step = normal(rows, width), RopeStep.random(QWEN3, rows, block_size=16)
    together = run_all(kernels, x, step, slice(0, rows))
    for row in (0, 7, 299):
        alone = run_all(kernels, x, step, slice(row, row + 1))
        assert all(same_bits(a, b[row : row + 1]) for a, b in zip(alone, together, strict=True))


def test_a_row_that_is_not_finite_harms_no_other(kernels: Kernels) -> None:
    rows, width = 6, 1024
    x, step = normal(rows, width), RopeStep.random(QWEN3, rows, block_size=16)
    clean = run_all(kernels, x, step, slice(0, rows))
    x[2, 5], x[3, 9], step.qkv[2, 4] = float("nan"), float("inf"), float("nan")
    spoiled = run_all(kernels, x, step, slice(0, rows))
    others = [0, 1, 4, 5]
    assert all(same_bits(a[others], b[others]) for a, b in zip(clean, spoiled, strict=True))
    assert all(out[2].float().isnan().any() for out in (spoiled[0], spoiled[1], spoiled[3], spoiled[4]))


def test_no_rows_are_no_work(kernels: Kernels) -> None:
    step = RopeStep.random(SMOLLM2, 4, block_size=16)
    outputs = run_all(kernels, normal(4, 512), step, slice(0, 0))
    assert all(out.numel() == 0 for out in outputs)


def test_a_refused_launch_names_the_function(kernels: Kernels) -> None:
    x = normal(2, 12)
    with pytest.raises(CudaFailed, match="baton_add_norm: invalid argument"):
        kernels.add_norm(x, x.clone(), normal(12), EPS, poison(2, 12))


@dataclass(frozen=True)
class Chain:
    """Kernels that each need the one before, many times over, as in a step of one sequence."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    normed: torch.Tensor
    gate_up: torch.Tensor
    twice: torch.Tensor

    @classmethod
    def random(cls, rows: int, hidden: int, seed: int) -> Chain:
        return cls(
            x=normal(rows, hidden, seed=seed),
            residual=normal(rows, hidden, seed=seed + 1),
            weight=normal(hidden, seed=seed + 2),
            normed=poison(rows, hidden),
            gate_up=poison(rows, 2 * hidden),
            twice=ints(torch.arange(rows).repeat_interleave(2)),
        )

    def run(self, kernels: Kernels) -> None:
        for _ in range(40):
            kernels.add_norm(self.x, self.residual, self.weight, EPS, self.normed)
            kernels.gather_rows(self.normed, self.twice, self.gate_up.view(-1, self.x.shape[1]))
            kernels.silu_mul(self.gate_up, self.x)


@pytest.mark.parametrize("rows", [1, 33])
def test_overlapped_launches_in_a_graph_give_the_bits_of_serial_ones(library: CudaLibrary, rows: int) -> None:
    overlapped, serial = (Kernels(library, DEVICE, overlap) for overlap in (Overlap.YES, Overlap.NO))
    captured = Chain.random(rows, 4096, seed=0)
    captured.run(overlapped)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run(overlapped)
    for seed in range(30):
        fresh = Chain.random(rows, 4096, seed)
        for name in ("x", "residual", "weight"):
            getattr(captured, name).copy_(getattr(fresh, name))
        graph.replay()
        fresh.run(serial)
        assert same_bits(captured.x, fresh.x)
        assert same_bits(captured.residual, fresh.residual)
