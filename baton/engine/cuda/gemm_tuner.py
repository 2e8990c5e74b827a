"""Measures the ways of computing a product on the device, with weights that are not in the L2 cache."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass

import torch

from baton.engine.cuda.cublaslt import CublasLt, Kind
from baton.engine.cuda.gemm_choices import FusedProduct, GemvWay, LtWay, MidRowsWay, Product, Way
from baton.engine.cuda.gemv import MAX_ROWS, Epilogue, Gemv, GemvShape, Norm
from baton.engine.cuda.library import CudaFailed, CudaLibrary
from baton.engine.cuda.mid_rows import MidRows, MidRowsShape

_CANDIDATES = 48  # algorithms of cublasLt to try
_FINALISTS = 4  # of them measured again, longer
_REPLAY_SECONDS = 1e-3
_LAUNCHES = (2, 32)  # fewest and most in one replay
# Of the time of other ways, what the kernels for 17 to 128 rows must stay below. Here each product follows its like and
# overlaps with it; in a step of 128 rows, bf16, a product that had won by 7 % so made the step 0.7 % longer.
_MID_ROWS_SHARE = 0.92
_WORST_ERROR = 1e-2  # relative; a candidate with more is wrong, not imprecise
# What the device can do at best, to estimate how many launches make a replay: bytes/s read and bf16 operations/s.
_BYTES_PER_SECOND = 4.5e12
_OPERATIONS_PER_SECOND = 7.5e14


@dataclass(frozen=True, slots=True)
class Family:
    """The weights of one kind of product in all layers, [n, k] each, and how a layer of few rows uses them."""

    weights: tuple[torch.Tensor, ...]
    weight_scales: tuple[torch.Tensor, ...] = ()  # float32 [n] each, with e4m3 weights
    bias: torch.Tensor | None = None  # one layer's
    epilogue: Epilogue = Epilogue.STORE

    @property
    def kind(self) -> Kind:
        return Kind.E4M3 if self.weight_scales else Kind.BF16

    @property
    def product(self) -> Product:
        n, k = self.weights[0].shape
        return Product(self.kind, n, k, self.bias is not None)

    @property
    def fused(self) -> FusedProduct:
        n, k = self.weights[0].shape
        return FusedProduct(self.kind, n, k, self.epilogue)


@dataclass(frozen=True, slots=True)
class _Operands:
    """One product's inputs and its output."""

    x: torch.Tensor
    x_scale: torch.Tensor | None
    out: torch.Tensor


Attempt = tuple[Callable[[int], None], Callable[[float], Way]]
"""Launches the product with the weights of a layer; and the choice, given its time."""


class GraphTimer:
    """Times launches inside a CUDA graph on a stream of its own."""

    def __init__(self, library: CudaLibrary, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._begin = library.declare("baton_capture_begin", (c_void_p,))
        self._abandon = library.declare("baton_capture_abandon", (c_void_p,))
        self._time = library.declare("baton_capture_time", (c_void_p, c_int, ctypes.POINTER(c_float)))

    def milliseconds(self, launch: Callable[[], None], replays: int) -> list[float]:
        """What each replay of everything that ``launch`` queues took. Raises CudaFailed when a launch is refused."""
        times = (c_float * replays)()
        with torch.cuda.stream(self.stream):
            self._begin(self.stream.cuda_stream)
            try:
                launch()
            except CudaFailed:
                self._abandon(self.stream.cuda_stream)
                raise
            self._time(self.stream.cuda_stream, replays, times)
        return list(times)


class GemmTuner:
    """Finds the fastest correct way for a family and a number of rows."""

    def __init__(
        self, library: CudaLibrary, device: torch.device, cublaslt: CublasLt, gemv: Gemv, mid_rows: MidRows | None
    ) -> None:
        """Without ``mid_rows`` its kernels are not tried."""
        self._device = device
        self._cublaslt = cublaslt
        self._gemv = gemv
        self._mid_rows = mid_rows
        self._timer = GraphTimer(library, device)

    def best(self, family: Family, rows: int) -> Way | None:
        """The fastest way for a plain product; None when nothing computes it."""

        def handicapped(way: Way) -> float:
            return way.microseconds / _MID_ROWS_SHARE if isinstance(way, MidRowsWay) else way.microseconds

        return min(self.compare(family, rows), key=handicapped, default=None)

    def compare(self, family: Family, rows: int) -> list[Way]:
        """The fastest of the other ways, then that by the kernels for 17 to 128 rows, where there is one."""
        operands = self._operands(family, rows)
        reference = _reference(family, operands)
        others = self._lt_attempts(family, operands)
        if rows <= MAX_ROWS and family.kind is Kind.BF16:
            others += self._gemv_attempts(family, operands, Epilogue.STORE, None)
        contests = [others]
        if self._mid_rows is not None:
            contests.append(self._mid_rows_attempts(family, operands, self._mid_rows))
        ways = [self._fastest(family, operands, attempts, reference) for attempts in contests]
        return [way for way in ways if way is not None]

    def best_fused(self, family: Family, rows: int) -> GemvWay | None:
        """The fastest way for the product that a layer of few rows needs, a norm before it unless it adds."""
        n, k = family.weights[0].shape
        columns = n // 2 if family.epilogue is Epilogue.SILU_MUL else n
        x = torch.randn(rows, k, dtype=torch.bfloat16, device=self._device)
        operands = _Operands(x, None, torch.zeros(rows, columns, dtype=torch.bfloat16, device=self._device))
        norm = None if family.epilogue is Epilogue.ADD else Norm(torch.ones_like(x[0]), 1e-5)
        attempts = self._gemv_attempts(family, operands, family.epilogue, norm)
        way = self._fastest(family, operands, attempts, None)
        return way if isinstance(way, GemvWay) else None

    def _operands(self, family: Family, rows: int) -> _Operands:
        n, k = family.weights[0].shape
        x = torch.randn(rows, k, dtype=torch.bfloat16, device=self._device)
        out = torch.empty(rows, n, dtype=torch.bfloat16, device=self._device)
        if family.kind is Kind.BF16:
            return _Operands(x, None, out)
        return _Operands((x * 16).to(torch.float8_e4m3fn), torch.full((rows,), 1 / 16, device=self._device), out)

    def _lt_attempts(self, family: Family, operands: _Operands) -> list[Attempt]:
        product, rows = family.product, operands.x.shape[0]
        plan = self._cublaslt.plan(product.kind, product.n, product.k, product.bias)

        def attempt(algorithm: bytes) -> Attempt:
            def launch(layer: int) -> None:
                scale = family.weight_scales[layer] if family.weight_scales else None
                self._cublaslt.run(
                    plan,
                    algorithm,
                    operands.x,
                    family.weights[layer],
                    operands.out,
                    family.bias,
                    operands.x_scale,
                    scale,
                )

            return launch, lambda microseconds: LtWay(algorithm, microseconds)

        return [attempt(algorithm) for algorithm in self._cublaslt.candidates(plan, rows, _CANDIDATES)]

    def _gemv_attempts(
        self, family: Family, operands: _Operands, epilogue: Epilogue, norm: Norm | None
    ) -> list[Attempt]:
        rows, k = operands.x.shape

        def attempt(shape: GemvShape) -> Attempt:
            def launch(layer: int) -> None:
                scale = family.weight_scales[layer] if family.weight_scales else None
                weight = family.weights[layer]
                self._gemv.run(shape, epilogue, operands.x, weight, operands.out, family.bias, scale, norm)

            return launch, lambda microseconds: GemvWay(shape, microseconds)

        return [attempt(shape) for shape in self._gemv.shapes(rows, k, epilogue, family.kind.dtype)]

    def _mid_rows_attempts(self, family: Family, operands: _Operands, mid_rows: MidRows) -> list[Attempt]:
        product, rows = family.product, operands.x.shape[0]

        def attempt(shape: MidRowsShape) -> Attempt:
            def launch(layer: int) -> None:
                scale = family.weight_scales[layer] if family.weight_scales else None
                weight = family.weights[layer]
                mid_rows.run(shape, operands.x, weight, operands.out, family.bias, operands.x_scale, scale)

            return launch, lambda microseconds: MidRowsWay(shape, microseconds)

        return [attempt(shape) for shape in mid_rows.shapes(rows, product.n, product.k, product.kind.dtype)]

    def _fastest(
        self, family: Family, operands: _Operands, attempts: Sequence[Attempt], reference: torch.Tensor | None
    ) -> Way | None:
        layers = len(family.weights)
        launches = _launches(family, operands.x.shape[0])
        torch.cuda.synchronize(self._device)

        def ranked(some: Sequence[Attempt], replays: int) -> list[tuple[float, Attempt]]:
            measured = [(self._measure(attempt, layers, launches, replays), attempt) for attempt in some]
            times = [(statistics.median(milliseconds), attempt) for milliseconds, attempt in measured if milliseconds]
            return sorted(times, key=lambda entry: entry[0])

        finalists = [attempt for _, attempt in ranked(attempts, replays=2)[:_FINALISTS]]
        for milliseconds, (launch, choose) in ranked(finalists, replays=7):
            if reference is None or self._is_right(launch, operands, reference):
                return choose(milliseconds * 1e3 / launches)
        return None

    def _measure(self, attempt: Attempt, layers: int, launches: int, replays: int) -> list[float]:
        """Milliseconds of each replay; none when the device refuses the attempt."""
        launch, _ = attempt

        def all_launches() -> None:
            for index in range(launches):
                launch(index % layers)

        try:
            with torch.cuda.stream(self._timer.stream):
                launch(0)  # outside the capture: the first launch loads the kernel
            return self._timer.milliseconds(all_launches, replays)
        except CudaFailed:
            return []

    def _is_right(self, launch: Callable[[int], None], operands: _Operands, reference: torch.Tensor) -> bool:
        operands.out.fill_(float("nan"))
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._timer.stream):
            launch(0)
        self._timer.stream.synchronize()
        difference = torch.linalg.vector_norm(operands.out.float() - reference)
        return bool(difference <= _WORST_ERROR * torch.linalg.vector_norm(reference))


def _launches(family: Family, rows: int) -> int:
    """So many that one replay takes about a millisecond."""
    product = family.product
    read = product.n * product.k * product.kind.dtype.itemsize / _BYTES_PER_SECOND
    computed = 2 * rows * product.n * product.k / _OPERATIONS_PER_SECOND
    fewest, most = _LAUNCHES
    return min(max(int(_REPLAY_SECONDS / max(read, computed)), fewest), most)


def _reference(family: Family, operands: _Operands) -> torch.Tensor:
    """The product with the first layer's weights, by torch, float32 [rows, n]."""
    x, weight = operands.x, family.weights[0]
    if operands.x_scale is None:
        product = (x @ weight.t()).float()
    else:
        scaled = x.to(torch.bfloat16) @ weight.to(torch.bfloat16).t()
        product = scaled.float() * operands.x_scale[:, None] * family.weight_scales[0][None, :]
    return product if family.bias is None else product + family.bias.float()
