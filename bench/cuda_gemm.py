"""Times all matrix products of a step, layer after layer with the weights of each: ``python -m bench.cuda_gemm``.

torch is ``torch.mm``; tuned is ``Gemm.linear``; fused is the chain of few rows, with norms, activation and residual in
it, so it does more than the others. The figures are medians over replays of a CUDA graph of the whole step, in
milliseconds, with the rate at which weights are read (or, of large steps, the rate of operations). The head is left
out of steps that are larger than any decode batch.

``--compare`` sets the fastest way by cublasLt beside that by the kernels for 17 to 128 rows, product by product:
microseconds of one among many in a row, each with weights that are not in the L2 cache, and the rate of reading them.
With ``--mid-rows`` those kernels are among the ways of the step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.engine.cuda.build import build
from baton.engine.cuda.gemm import Gemm
from baton.engine.cuda.gemm_choices import GemvWay, LtWay, MidRowsWay, Way
from baton.engine.cuda.gemm_tuner import Family, GraphTimer
from baton.engine.cuda.gemv import MAX_ROWS, Epilogue, Norm
from baton.engine.cuda.kernels import Overlap
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.mid_rows import MidRows

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 2048, 8192)
COMPARED_ROWS = (24, 32, 64, 96, 128)
COMPARED_BYTES, COMPARED_LAYERS = 200e6, (2, 32)  # so many weights are several times the L2 cache; fewest, most layers
LARGEST_DECODE = 512
REPLAYS = 9
EPS = 1e-5
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Model:
    """The sizes that products depend on."""

    name: str
    layers: int
    hidden: int
    q_size: int
    kv_size: int
    ffn: int
    vocab: int

    def sizes(self) -> list[tuple[str, int, int, Epilogue]]:
        """Name, n, k and epilogue of each product of a layer, then the head's."""
        return [
            ("qkv", self.q_size + 2 * self.kv_size, self.hidden, Epilogue.STORE),
            ("output", self.hidden, self.q_size, Epilogue.ADD),
            ("gate_up", 2 * self.ffn, self.hidden, Epilogue.SILU_MUL),
            ("down", self.hidden, self.ffn, Epilogue.ADD),
            ("head", self.vocab, self.hidden, Epilogue.STORE),
        ]


MODELS = {
    "8b": Model("Llama-3-8B", 32, 4096, 4096, 1024, 14_336, 128_256),
    "0.6b": Model("Qwen3-0.6B", 28, 1024, 2048, 1024, 3072, 151_936),
}


class Step:
    """One model's weights and buffers, and the ways of going through them."""

    def __init__(self, model: Model, gemm: Gemm, e4m3: bool) -> None:
        self.model = model
        self.gemm = gemm
        self.families = [
            _family(n, k, 1 if name == "head" else model.layers, epilogue, e4m3)
            for name, n, k, epilogue in model.sizes()
        ]
        self.norm = Norm(torch.ones(model.hidden, dtype=torch.bfloat16, device=DEVICE), EPS)

    def bytes(self, rows: int) -> int:
        return sum(weight.nbytes for family in self._used(rows) for weight in family.weights)

    def operations(self, rows: int) -> int:
        return sum(2 * rows * weight.numel() for family in self._used(rows) for weight in family.weights)

    def plain(
        self, rows: int, product: Callable[[torch.Tensor, Family, int, torch.Tensor], None]
    ) -> Callable[[], None]:
        """Calls ``product`` (x, family, layer, out) for every weight, in the step's order."""
        buffers = [
            (
                family,
                _normal(rows, family.weights[0].shape[1]).to(family.weights[0].dtype),
                _normal(rows, family.product.n),
            )
            for family in self._used(rows)
        ]

        def launch() -> None:
            for layer in range(self.model.layers):
                for family, x, out in buffers[:4]:
                    product(x, family, layer, out)
            for family, x, out in buffers[4:]:
                product(x, family, 0, out)

        return launch

    def fused(self, rows: int) -> Callable[[], None]:
        """The chain of few rows; attention is left out."""
        model, gemm = self.model, self.gemm
        qkv, output, gate_up, down, head = self.families
        residual, projected = _normal(rows, model.hidden), _normal(rows, model.q_size + 2 * model.kv_size)
        mixed, gated, logits = _normal(rows, model.q_size), _normal(rows, model.ffn), _normal(rows, model.vocab)

        def launch() -> None:
            for layer in range(model.layers):
                gemm.norm_linear(residual, self.norm, *_operands(qkv, layer, projected))
                gemm.linear_add(mixed, *_operands(output, layer, residual))
                gemm.norm_gate_up_silu(residual, self.norm, *_operands(gate_up, layer, gated))
                gemm.linear_add(gated, *_operands(down, layer, residual))
            gemm.norm_linear(residual, self.norm, *_operands(head, 0, logits))

        return launch

    def _used(self, rows: int) -> list[Family]:
        return self.families if rows <= LARGEST_DECODE else self.families[:4]


def _normal(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE)


def _family(n: int, k: int, layers: int, epilogue: Epilogue, e4m3: bool) -> Family:
    weights = tuple(torch.empty(n, k, dtype=torch.bfloat16, device=DEVICE).normal_(0, k**-0.5) for _ in range(layers))
    if not e4m3:
        return Family(weights, epilogue=epilogue)
    scale = torch.full((n,), k**-0.5, device=DEVICE)
    return Family(
        tuple((weight * k**0.5).to(torch.float8_e4m3fn) for weight in weights), (scale,) * layers, epilogue=epilogue
    )


def _operands(
    family: Family, layer: int, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor | None]:
    """weight, out, bias, weight_scale."""
    return family.weights[layer], out, None, family.weight_scales[layer] if family.weight_scales else None


def _ways(step: Step, rows: int) -> dict[str, Callable[[], None]]:
    """What to time for a step of ``rows`` rows, by name."""
    gemm = step.gemm

    def by_torch(x: torch.Tensor, family: Family, layer: int, out: torch.Tensor) -> None:
        torch.mm(x, family.weights[layer].t(), out=out)

    def tuned(x: torch.Tensor, family: Family, layer: int, out: torch.Tensor) -> None:
        gemm.linear(x, family.weights[layer], out)

    ones = torch.ones(rows, device=DEVICE)

    def tuned_fp8(x: torch.Tensor, family: Family, layer: int, out: torch.Tensor) -> None:
        gemm.linear_fp8(x, ones, family.weights[layer], family.weight_scales[layer], out)

    if step.families[0].weight_scales:
        ways = {"tuned fp8": step.plain(rows, tuned_fp8)}
    else:
        ways = {"torch": step.plain(rows, by_torch), "tuned": step.plain(rows, tuned)}
    if rows <= MAX_ROWS:
        ways["fused"] = step.fused(rows)
    return ways


def _time(timer: GraphTimer, launch: Callable[[], None]) -> float | None:
    """Milliseconds; None where a product has no kernel for so many rows."""
    try:
        with torch.cuda.stream(timer.stream):
            launch()
        timer.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=timer.stream):
            launch()
    except ValueError:
        return None
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    graph.replay()
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def _describe(way: Way | None) -> str:
    if isinstance(way, GemvWay):
        shape = way.shape
        return f"gemv {shape.k_warps}x{shape.columns}x{shape.unroll}/{shape.resident} {way.microseconds:.1f}"
    if isinstance(way, MidRowsWay):
        cut = way.shape.cut
        shape = f"{cut.columns}x{cut.groups}x{cut.pair}/{cut.resident} k/{way.shape.splits}"
        return f"mid-rows {shape} {way.microseconds:.1f}"
    return "none" if way is None else f"lt {way.microseconds:.1f}"


def _report(step: Step, timer: GraphTimer, rows: Sequence[int]) -> list[str]:
    """The table of one model."""
    kind = "e4m3" if step.families[0].weight_scales else "bf16"
    lines = [f"{step.model.name} {kind}, ms of all products of a step"]
    for count in rows:
        cells = [f"M {count:5d}"]
        for name, launch in _ways(step, count).items():
            milliseconds = _time(timer, launch)
            if milliseconds is None:
                cells.append(f"{name} -")
            elif count <= LARGEST_DECODE:
                cells.append(f"{name} {milliseconds:.3f} ({step.bytes(count) / milliseconds / 1e9:.2f} TB/s)")
            else:
                cells.append(f"{name} {milliseconds:.1f} ({step.operations(count) / milliseconds / 1e9:.0f} TFLOP/s)")
        lines.append("  ".join(cells))
    lines.append(f"fused pays up to M = {max((count for count in rows if step.gemm.supports(count)), default=0)}")
    names = [name for name, *_ in step.model.sizes()]
    for count in rows:
        found = [step.gemm.choices.way(family.product, count) for family in step.families]
        lines.append(f"  M {count:5d} us: " + ", ".join(map(lambda n, w: f"{n} {_describe(w)}", names, found)))
    for count in (count for count in rows if count <= MAX_ROWS):
        fused = [step.gemm.choices.fused_way(family.fused, count) for family in step.families]
        lines.append(f"  M {count:5d} fused us: " + ", ".join(map(lambda n, w: f"{n} {_describe(w)}", names, fused)))
    return lines


def _tune_and_report(
    gemm: Gemm, timer: GraphTimer, model: Model, kind: str, rows: Sequence[int], cache: Path | None
) -> list[str]:
    step = Step(model, gemm, kind == "e4m3")
    started = time.monotonic()
    gemm.tune(step.families, rows, cache)
    seconds = time.monotonic() - started
    return [*_report(step, timer, rows), f"tuned in {seconds:.1f} s"]


def _compare(gemm: Gemm, model: Model, kind: str, rows: Sequence[int]) -> list[str]:
    """A line for each product of a layer and number of rows."""
    lines = [f"{model.name} {kind}, us of one product (TB/s of weights)"]
    fewest, most = COMPARED_LAYERS
    for name, n, k, epilogue in model.sizes()[:4]:
        size = n * k * (1 if kind == "e4m3" else 2)
        layers = min(max(round(COMPARED_BYTES / size), fewest), most)
        family = _family(n, k, layers, epilogue, kind == "e4m3")
        for count in rows:
            ways = gemm.compare(family, count)
            cells = [f"{_describe(way)} ({size / way.microseconds / 1e6:.2f})" for way in ways]
            by_lt = [way.microseconds for way in ways if isinstance(way, LtWay)]
            ours = [way.microseconds for way in ways if isinstance(way, MidRowsWay)]
            gain = [f"{before / after:.2f}x" for before, after in zip(by_lt, ours, strict=False)]
            lines.append("  ".join([f"  {name:8s} {n:6d} x {k:5d}  M {count:4d}", *cells, *gain]))
    return lines


def main() -> None:
    """Tune, time, and print one table a model at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=None)
    parser.add_argument("--kinds", nargs="+", choices=("bf16", "e4m3"), default=["bf16"])
    parser.add_argument("--cache", type=Path, default=None, help="JSON of measured choices to read and add to")
    parser.add_argument("--mid-rows", action="store_true", help="try the kernels for 17 to 128 rows too")
    parser.add_argument("--compare", action="store_true", help="set those kernels beside cublasLt, product by product")
    parser.add_argument("--no-overlap", dest="overlap", action="store_const", const=Overlap.NO, default=Overlap.YES)
    arguments = parser.parse_args()
    library = CudaLibrary(build())
    mid_rows = MidRows(library, DEVICE, arguments.overlap) if arguments.mid_rows or arguments.compare else None
    timer = GraphTimer(library, DEVICE)
    rows = arguments.rows or (COMPARED_ROWS if arguments.compare else ROWS)
    lines: list[str] = []
    for name in arguments.models:
        for kind in arguments.kinds:
            started = time.monotonic()
            with Gemm(library, DEVICE, arguments.overlap, mid_rows) as gemm:
                if arguments.compare:
                    lines += _compare(gemm, MODELS[name], kind, rows)
                else:
                    lines += _tune_and_report(gemm, timer, MODELS[name], kind, rows, arguments.cache)
                torch.cuda.synchronize()
            lines += [f"took {time.monotonic() - started:.1f} s", ""]
            torch.cuda.empty_cache()
    print("\n".join(lines))


if __name__ == "__main__":
    main()
