"""Times the row-wise CUDA kernels alone and as the chain of one layer: ``python -m bench.cuda_kernels``.

Each figure is the median over replays of a CUDA graph of many launches, in microseconds a launch, without and with
overlap of neighbours (programmatic dependent launch), and the rate of the better one. Large steps take turns with
several sets of buffers, so that they come from memory; small ones come from the L2 cache, as in a real step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from baton.engine.cuda.build import build
from baton.engine.cuda.kernels import Kernels, Overlap
from baton.engine.cuda.library import CudaLibrary
from baton.engine.rope import rope_table
from baton.engine.spec import DecoderSpec, RopeSpec
from bench.captured import median_time

LLAMA_8B = DecoderSpec("llama", 128_256, 8192, 4096, 14_336, 32, 32, 8, 128, 1e-5, RopeSpec(5e5), tied_head=False)
QWEN3_06B = replace(
    LLAMA_8B, vocab_size=151_936, hidden_size=1024, ffn_size=3072, layers=28, heads=16, qk_norm=True, tied_head=True
)
SPECS = {"Llama-3-8B": LLAMA_8B, "Qwen3-0.6B": QWEN3_06B}
ROWS = (1, 64, 256, 2048, 8192)
BLOCK_SIZE = 16
POOL_LAYERS = 2
CACHE_BYTES = 256 << 20  # what the buffers of large steps must exceed


@dataclass(frozen=True)
class Buffers:
    """One step's activations, inputs and a pool of two layers."""

    spec: DecoderSpec
    ids: torch.Tensor
    sources: torch.Tensor
    slots: torch.Tensor
    x: torch.Tensor
    residual: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    gate_up: torch.Tensor
    gated: torch.Tensor
    mixed: torch.Tensor
    normed_e4m3: torch.Tensor
    gated_e4m3: torch.Tensor
    mixed_e4m3: torch.Tensor
    scales: torch.Tensor
    pool: torch.Tensor
    pool_e4m3: torch.Tensor

    @classmethod
    def allocate(cls, spec: DecoderSpec, rows: int) -> Buffers:
        def normal(width: int) -> torch.Tensor:
            return torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)

        blocks = rows // BLOCK_SIZE + 1
        pool = torch.zeros(blocks, POOL_LAYERS, 2, spec.kv_heads, BLOCK_SIZE, spec.head_dim, device="cuda")
        ids = torch.randperm(max(rows, 8192), device="cuda")[:rows].int() % spec.context_length
        return cls(
            spec=spec,
            ids=ids,
            sources=torch.full_like(ids, -1),
            slots=torch.randperm(blocks * BLOCK_SIZE, device="cuda")[:rows].int(),
            x=normal(spec.hidden_size),
            residual=normal(spec.hidden_size),
            normed=normal(spec.hidden_size),
            qkv=normal(spec.q_size + 2 * spec.kv_size),
            gate_up=normal(2 * spec.ffn_size),
            gated=normal(spec.ffn_size),
            mixed=normal(spec.q_size),
            normed_e4m3=normal(spec.hidden_size).to(torch.float8_e4m3fn),
            gated_e4m3=normal(spec.ffn_size).to(torch.float8_e4m3fn),
            mixed_e4m3=normal(spec.q_size).to(torch.float8_e4m3fn),
            scales=torch.zeros(rows, device="cuda"),
            pool=pool.to(torch.bfloat16),
            pool_e4m3=pool.to(torch.float8_e4m3fn),
        )


@dataclass(frozen=True)
class Constants:
    """The weights that the kernels read."""

    table: torch.Tensor
    norm: torch.Tensor
    head_norm: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def random(cls, spec: DecoderSpec) -> Constants:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        cos, sin = (table.cuda() for table in rope_table(spec))
        head_norm = normal(spec.head_dim) if spec.qk_norm else None
        return cls(normal(spec.vocab_size, spec.hidden_size), normal(spec.hidden_size), head_norm, cos, sin)


Run = Callable[[Kernels, Buffers, Constants], None]


@dataclass(frozen=True)
class Case:
    """One kernel, or several in the order of a step. ``row_bytes`` are read and written for each row."""

    name: str
    run: Run
    row_bytes: Callable[[DecoderSpec], int]


def embed(kernels: Kernels, b: Buffers, c: Constants) -> None:
    kernels.embed(b.ids, b.sources, b.ids, c.table, b.residual)


def gather_rows(kernels: Kernels, b: Buffers, c: Constants) -> None:
    kernels.gather_rows(c.table, b.ids, b.x)


def add_norm(kernels: Kernels, b: Buffers, c: Constants) -> None:
    kernels.add_norm(b.x, b.residual, c.norm, b.spec.norm_eps, b.normed)


def add_norm_quant(kernels: Kernels, b: Buffers, c: Constants) -> None:
    kernels.add_norm_quant(b.x, b.residual, c.norm, b.spec.norm_eps, b.normed_e4m3, b.scales)


def rope_append(kernels: Kernels, b: Buffers, c: Constants) -> None:
    norms = (c.head_norm, c.head_norm)
    kernels.rope_append(b.qkv, b.ids, b.slots, c.cos, c.sin, b.spec, *norms, b.pool, 1)


def rope_append_quant(kernels: Kernels, b: Buffers, c: Constants) -> None:
    norms = (c.head_norm, c.head_norm)
    kernels.rope_append_quant(b.qkv, b.ids, b.slots, c.cos, c.sin, b.spec, *norms, b.pool_e4m3, 1, 1.0, 1.0)


def silu_mul(kernels: Kernels, b: Buffers, c: Constants) -> None:
    kernels.silu_mul(b.gate_up, b.gated)


def silu_mul_quant(kernels: Kernels, b: Buffers, c: Constants) -> None:
    kernels.silu_mul_quant(b.gate_up, b.gated_e4m3, b.scales)


def quantize(kernels: Kernels, b: Buffers, c: Constants) -> None:
    kernels.quantize(b.mixed, b.mixed_e4m3, b.scales)


def layer(kernels: Kernels, b: Buffers, c: Constants) -> None:
    for run in (add_norm, rope_append, add_norm, silu_mul):
        run(kernels, b, c)


def layer_e4m3(kernels: Kernels, b: Buffers, c: Constants) -> None:
    for run in (add_norm_quant, rope_append_quant, quantize, add_norm_quant, silu_mul_quant):
        run(kernels, b, c)


def rope_bytes(spec: DecoderSpec, cached: int) -> int:
    """q is read and written, k and v are read and cached; cos and sin are read."""
    return 4 * spec.q_size + (2 + cached) * 2 * spec.kv_size + 4 * spec.head_dim


CASES = (
    Case("embed", embed, lambda s: 4 * s.hidden_size),
    Case("gather_rows", gather_rows, lambda s: 4 * s.hidden_size),
    Case("add_norm", add_norm, lambda s: 8 * s.hidden_size),
    Case("add_norm_quant", add_norm_quant, lambda s: 7 * s.hidden_size),
    Case("rope_append", rope_append, lambda s: rope_bytes(s, 2)),
    Case("rope_append_quant", rope_append_quant, lambda s: rope_bytes(s, 1)),
    Case("silu_mul", silu_mul, lambda s: 6 * s.ffn_size),
    Case("silu_mul_quant", silu_mul_quant, lambda s: 5 * s.ffn_size),
    Case("quantize", quantize, lambda s: 3 * s.q_size),
    Case("layer", layer, lambda s: 16 * s.hidden_size + rope_bytes(s, 2) + 6 * s.ffn_size),
    Case("layer_e4m3", layer_e4m3, lambda s: 14 * s.hidden_size + rope_bytes(s, 1) + 3 * s.q_size + 5 * s.ffn_size),
)


def microseconds(case: Case, kernels: Kernels, sets: Sequence[Buffers], constants: Constants) -> float:
    """The time of one run of ``case``, in a graph of many."""
    launches = 20 if len(sets) > 1 or sets[0].x.shape[0] > 1024 else 200
    return median_time(lambda i: case.run(kernels, sets[i % len(sets)], constants), launches)


def measure(spec: DecoderSpec, rows: int, library: CudaLibrary) -> dict[str, tuple[float, float, float]]:
    """By case: microseconds without and with overlap, and TB/s of the better."""
    constants = Constants.random(spec)
    first = Buffers.allocate(spec, rows)
    smallest = 4 * rows * spec.hidden_size
    count = min(6, 1 + CACHE_BYTES // smallest) if rows > 1024 else 1
    sets = [first, *(Buffers.allocate(spec, rows) for _ in range(count - 1))]
    device = torch.device("cuda")
    found = {}
    for case in CASES:
        serial, overlapped = (
            microseconds(case, Kernels(library, device, overlap), sets, constants) for overlap in Overlap
        )
        found[case.name] = (serial, overlapped, case.row_bytes(spec) * rows / min(serial, overlapped) / 1e6)
    return found


def main() -> None:
    library = CudaLibrary(build())
    print(f"{torch.cuda.get_device_name()}: microseconds serial / overlapped, TB/s")
    for name, spec in SPECS.items():
        columns = [measure(spec, rows, library) for rows in ROWS]
        print(f"\n{name:<18}" + "".join(f"{f'T = {rows}':>24}" for rows in ROWS))
        for case in CASES:
            cells = (column[case.name] for column in columns)
            print(f"{case.name:<18}" + "".join(f"{f'{a:.2f} / {b:.2f}':>17} {rate:6.3f}" for a, b, rate in cells))
        step = min(columns[0]["layer"][:2]) * spec.layers
        print(f"row-wise work of all {spec.layers} layers at T = 1: {step:.0f} us")


if __name__ == "__main__":
    main()
