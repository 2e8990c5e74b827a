"""Every matrix product of the decoder, each computed in the way that was measured to be the fastest for its shape.

Products are row-major, x [M, K] times weight [N, K] transposed, on torch's current stream; nothing allocates or
synchronises outside ``tune``. A layer of few rows has a shorter chain of launches, used where ``supports`` says so:

    norm_linear (qkv) . rope . attention . linear_add (output) . norm_gate_up_silu . linear_add (down)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from baton.engine.cuda.cublaslt import CublasLt, Kind
from baton.engine.cuda.gemm_choices import Choices, FusedProduct, GemvWay, LtWay, MidRowsWay, Product, Way
from baton.engine.cuda.gemm_tuner import Family, GemmTuner
from baton.engine.cuda.gemv import MAX_ROWS, Epilogue, Gemv, GemvShape, Norm
from baton.engine.cuda.kernels import Overlap
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.mid_rows import MidRows

# Rows to measure: the decode batches in steps that change which tile is best, and prefill chunks.
TUNED_ROWS = (
    *(1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048),
    *(4096, 8192),
)

# What a layer's norms, activation and rounding take beside the plain products of few rows, in launches that the fused
# ones save: on an H200 2.6 to 3.3 for bf16 operands and 5 to 8.6 for e4m3, by bench.cuda_kernels at one row.
ROW_WISE_MICROSECONDS = {Kind.BF16: 2.5, Kind.E4M3: 5.0}

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], None]
Fp8Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], None]


class Gemm:
    """The products' ways by shape. A context manager: closing gives cublasLt's handle and workspace back."""

    def __init__(
        self,
        library: CudaLibrary,
        device: torch.device,
        overlap: Overlap = Overlap.YES,
        mid_rows: MidRows | None = None,
    ) -> None:
        """``tune`` tries ``mid_rows`` where it is given. Raises CudaUnavailable when ``device`` is no GPU."""
        self._device = device
        self._library = library
        self._cublaslt = CublasLt(library, device)
        self._gemv = Gemv(library, device, overlap)
        self._mid_rows = mid_rows
        self.choices = Choices(torch.cuda.get_device_name(device), self._cublaslt.version, mid_rows is not None)
        self._linears: dict[tuple[int, int, int, bool], Linear] = {}
        self._fp8_linears: dict[tuple[int, int, int, bool], Fp8Linear] = {}
        self._shapes: dict[tuple[int, int, int, Epilogue, torch.dtype], GemvShape] = {}
        self._fused_rows = 0

    def __enter__(self) -> Gemm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing may be queued or captured that still uses it."""
        self._cublaslt.close()

    # ------------------------------------------------------------------------------------------------------- tuning

    def tune(self, families: Sequence[Family], rows: Iterable[int] = TUNED_ROWS, cache: Path | None = None) -> None:
        """Measure what ``cache`` (JSON, one file for all models) does not hold yet, and add it there.

        Takes tens of seconds for a large model at first. Allocates scratch for the largest rows and synchronises; not
        during a capture. Raises OSError when ``cache`` cannot be written.
        """
        if cache is not None:
            self.choices.load(cache)
        tuner = self._tuner()
        before = len(self.choices.products) + len(self.choices.fused)
        wanted = sorted(set(rows))
        for family in families:
            for count in wanted:
                self._tune_one(tuner, family, count)
        if cache is not None and len(self.choices.products) + len(self.choices.fused) > before:
            self.choices.save(cache)
        self._linears.clear()
        self._fp8_linears.clear()
        self._shapes.clear()
        self._fused_rows = self._count_fused_rows(families, wanted)

    def compare(self, family: Family, rows: int) -> list[Way]:
        """The fastest way by cublasLt and that by the kernels for 17 to 128 rows, measured anew. Allocates; not during
        a capture."""
        return self._tuner().compare(family, rows)

    def _tuner(self) -> GemmTuner:
        return GemmTuner(self._library, self._device, self._cublaslt, self._gemv, self._mid_rows)

    def _tune_one(self, tuner: GemmTuner, family: Family, rows: int) -> None:
        product, fused = family.product, family.fused
        if (product, rows) not in self.choices.products:
            way = tuner.best(family, rows)
            if way is not None:
                self.choices.products[product, rows] = way
        if rows <= MAX_ROWS and (fused, rows) not in self.choices.fused:
            fused_way = tuner.best_fused(family, rows)
            if fused_way is not None:
                self.choices.fused[fused, rows] = fused_way

    def _count_fused_rows(self, families: Sequence[Family], tuned: Sequence[int]) -> int:
        """The most rows up to which the fused products of a layer take no longer than the plain ones and the rest."""
        most = 0
        for rows in (count for count in tuned if count <= MAX_ROWS):
            plain = [self.choices.products.get((family.product, rows)) for family in families]
            fused = [self.choices.fused.get((family.fused, rows)) for family in families]
            if None in plain or None in fused:
                break
            launches = ROW_WISE_MICROSECONDS[families[0].kind]
            if sum(way.microseconds for way in fused if way) > launches + sum(way.microseconds for way in plain if way):
                break
            most = rows
        return most

    # ------------------------------------------------------------------------------------------------ plain products

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """out [M, N] = x [M, K] @ weight [N, K]^T (+ bias [N]); all bf16 and contiguous, M >= 1."""
        n, k = weight.shape
        key = (x.shape[0], n, k, bias is not None)
        linear = self._linears.get(key)
        if linear is None:
            linear = self._linears[key] = self._choose_linear(*key)
        linear(x, weight, out, bias)

    def linear_fp8(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """out [M, N] bf16 = (x * x_scale) @ (weight * weight_scale)^T (+ bias [N] bf16).

        x [M, K] and weight [N, K] e4m3, x_scale [M] and weight_scale [N] float32; K and N multiples of 16.
        """
        n, k = weight.shape
        key = (x.shape[0], n, k, bias is not None)
        linear = self._fp8_linears.get(key)
        if linear is None:
            linear = self._fp8_linears[key] = self._choose_fp8_linear(*key)
        linear(x, weight, out, bias, x_scale, weight_scale)

    def _choose_linear(self, rows: int, n: int, k: int, bias: bool) -> Linear:
        product = Product(Kind.BF16, n, k, bias)
        way = self.choices.way(product, rows)
        if isinstance(way, GemvWay) and way.shape in self._usable(rows, k, Epilogue.STORE):
            gemv, few = self._gemv, way.shape
            return lambda x, weight, out, bias: gemv.run(few, Epilogue.STORE, x, weight, out, bias)
        by_mid_rows = self._choose_mid_rows(way, product, rows)
        if by_mid_rows is not None:
            return by_mid_rows
        plan, algorithm = self._choose_algorithm(product, rows)
        run = self._cublaslt.run
        return lambda x, weight, out, bias: run(plan, algorithm, x, weight, out, bias)

    def _choose_fp8_linear(self, rows: int, n: int, k: int, bias: bool) -> Fp8Linear:
        product = Product(Kind.E4M3, n, k, bias)
        by_mid_rows = self._choose_mid_rows(self.choices.way(product, rows), product, rows)
        if by_mid_rows is not None:
            return by_mid_rows
        return partial(self._cublaslt.run, *self._choose_algorithm(product, rows))

    def _choose_mid_rows(self, way: Way | None, product: Product, rows: int) -> Callable[..., None] | None:
        """The kernels for 17 to 128 rows, if ``way`` names them and their shape can compute ``rows`` rows as well."""
        mid_rows, n, k = self._mid_rows, product.n, product.k
        if mid_rows is None or not isinstance(way, MidRowsWay):
            return None
        if not mid_rows.accepts(way.shape, rows, n, k, product.kind.dtype):
            return None
        return partial(mid_rows.run, way.shape)

    def _choose_algorithm(self, product: Product, rows: int) -> tuple[int, bytes | None]:
        """The plan, and the algorithm measured for about as many rows if it can compute ``rows`` as well."""
        plan = self._cublaslt.plan(product.kind, product.n, product.k, product.bias)
        way = self.choices.way(product, rows)
        if isinstance(way, LtWay) and self._cublaslt.accepts(plan, rows, way.algorithm):
            return plan, way.algorithm
        proposed = self._cublaslt.candidates(plan, rows, 1)
        return plan, proposed[0] if proposed else None

    # ---------------------------------------------------------------------------------------- few rows, fused products

    def supports(self, rows: int) -> bool:
        """Whether the fused products of the tuned families were measured to be worth while for ``rows`` rows."""
        return 1 <= rows <= self._fused_rows

    def norm_linear(
        self,
        residual: torch.Tensor,
        norm: Norm,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
    ) -> None:
        """out [M, N] = rms_norm(residual [M, K]) * gain @ weight [N, K]^T (+ bias); M at most 16.

        Activations bf16; weight bf16, or e4m3 with ``weight_scale`` float32 [N].
        """
        self._run_fused(Epilogue.STORE, residual, weight, out, bias, weight_scale, norm)

    def norm_gate_up_silu(
        self,
        residual: torch.Tensor,
        norm: Norm,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
    ) -> None:
        """out [M, F] = silu(gate) * up, of the normed residual [M, K] times weight [2F, K] (gate rows, then up)."""
        self._run_fused(Epilogue.SILU_MUL, residual, weight, out, bias, weight_scale, norm)

    def linear_add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor,
        bias: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
    ) -> None:
        """residual [M, N] += x [M, K] @ weight [N, K]^T (+ bias); the product is rounded to bf16 before it is added."""
        self._run_fused(Epilogue.ADD, x, weight, residual, bias, weight_scale, None)

    def _run_fused(
        self,
        epilogue: Epilogue,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        weight_scale: torch.Tensor | None,
        norm: Norm | None,
    ) -> None:
        n, k = weight.shape
        key = (x.shape[0], n, k, epilogue, weight.dtype)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = self._choose_shape(*key)
        self._gemv.run(shape, epilogue, x, weight, out, bias, weight_scale, norm)

    def _choose_shape(self, rows: int, n: int, k: int, epilogue: Epilogue, dtype: torch.dtype) -> GemvShape:
        """The measured shape, or the first that works. Raises ValueError when none does."""
        usable = self._usable(rows, k, epilogue, dtype)
        if not usable:
            raise ValueError(f"rows: no kernel multiplies {rows} rows of {k} {dtype} values with {n} weight rows")
        kind = Kind.E4M3 if dtype.itemsize == 1 else Kind.BF16
        way = self.choices.fused_way(FusedProduct(kind, n, k, epilogue), rows)
        return way.shape if way is not None and way.shape in usable else usable[0]

    def _usable(self, rows: int, k: int, epilogue: Epilogue, dtype: torch.dtype = torch.bfloat16) -> list[GemvShape]:
        return self._gemv.shapes(rows, k, epilogue, dtype)
