"""Which way of computing a product was measured to be the fastest, and the file that remembers it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.engine.cuda.cublaslt import Kind
from baton.engine.cuda.gemv import Epilogue, GemvShape
from baton.engine.cuda.mid_rows import Cut, MidRowsShape


@dataclass(frozen=True, slots=True)
class Product:
    """Products that differ in their rows only. Weights are [n, k]; x and weights are of ``kind``."""

    kind: Kind
    n: int
    k: int
    bias: bool


@dataclass(frozen=True, slots=True)
class FusedProduct:
    """A product of few rows with what surrounds it. Only the weights are of ``kind``: x is bf16."""

    kind: Kind
    n: int
    k: int
    epilogue: Epilogue


@dataclass(frozen=True, slots=True)
class LtWay:
    """By cublasLt with this algorithm (64 bytes of its own)."""

    algorithm: bytes
    microseconds: float  # for one product, with weights that are not in the L2 cache


@dataclass(frozen=True, slots=True)
class GemvWay:
    """By the kernels for few rows, cut in this shape."""

    shape: GemvShape
    microseconds: float


@dataclass(frozen=True, slots=True)
class MidRowsWay:
    """By the kernels for 17 to 128 rows, in this shape."""

    shape: MidRowsShape
    microseconds: float


Way = LtWay | GemvWay | MidRowsWay


@dataclass(slots=True)
class Choices:
    """The fastest ways by product and rows, valid for one GPU model, one version of cublasLt and one set of kernels."""

    device: str
    cublaslt: int
    mid_rows: bool = False  # whether the kernels for 17 to 128 rows were among those measured
    products: dict[tuple[Product, int], Way] = field(default_factory=dict)
    fused: dict[tuple[FusedProduct, int], GemvWay] = field(default_factory=dict)

    def way(self, product: Product, rows: int) -> Way | None:
        """The way measured for the fewest rows that are at least ``rows``, else for the most; None: never measured."""
        measured = _nearest([known for of, known in self.products if of == product], rows)
        return None if measured is None else self.products[product, measured]

    def fused_way(self, product: FusedProduct, rows: int) -> GemvWay | None:
        measured = _nearest([known for of, known in self.fused if of == product], rows)
        return None if measured is None else self.fused[product, measured]

    def save(self, path: Path) -> None:
        """Write all choices to ``path`` as JSON, whole or not at all. Raises OSError."""
        content = {
            "device": self.device,
            "cublaslt": self.cublaslt,
            "mid_rows": self.mid_rows,
            "products": [_product_entry(product, rows, way) for (product, rows), way in self.products.items()],
            "fused": [_fused_entry(product, rows, way) for (product, rows), way in self.fused.items()],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(path)

    def load(self, path: Path) -> None:
        """Add what ``path`` holds, unless it was measured otherwise, or is not there, or cannot be read."""
        try:
            content = json.loads(path.read_text())
            measured = content["device"], content["cublaslt"], content.get("mid_rows", False)
            if measured != (self.device, self.cublaslt, self.mid_rows):
                return
            products = dict(map(_read_product, content["products"]))
            fused = dict(map(_read_fused, content["fused"]))
        except (OSError, ValueError, KeyError, TypeError):
            return  # a cache: what is lost is measured again
        self.products |= products
        self.fused |= fused


def _nearest(measured: list[int], rows: int) -> int | None:
    return min((known for known in measured if known >= rows), default=max(measured, default=None))


def _product_entry(product: Product, rows: int, way: Way) -> dict[str, Any]:
    entry = {"kind": product.kind.name, "n": product.n, "k": product.k, "bias": product.bias, "rows": rows}
    if isinstance(way, LtWay):
        return entry | {"algorithm": way.algorithm.hex(), "microseconds": round(way.microseconds, 2)}
    if isinstance(way, MidRowsWay):
        cut = way.shape.cut
        shape = [cut.columns, cut.groups, cut.pair, cut.resident, way.shape.splits]
        return entry | {"mid_rows": shape, "microseconds": round(way.microseconds, 2)}
    return entry | _gemv_entry(way)


def _fused_entry(product: FusedProduct, rows: int, way: GemvWay) -> dict[str, Any]:
    entry = {"kind": product.kind.name, "n": product.n, "k": product.k, "epilogue": product.epilogue.name}
    return entry | {"rows": rows} | _gemv_entry(way)


def _gemv_entry(way: GemvWay) -> dict[str, Any]:
    shape = way.shape
    cut = [shape.k_warps, shape.columns, shape.unroll, shape.resident]
    return {"gemv": cut, "microseconds": round(way.microseconds, 2)}


def _read_product(entry: dict[str, Any]) -> tuple[tuple[Product, int], Way]:
    product = Product(Kind[entry["kind"]], int(entry["n"]), int(entry["k"]), bool(entry["bias"]))
    if "algorithm" in entry:
        way: Way = LtWay(bytes.fromhex(entry["algorithm"]), float(entry["microseconds"]))
    elif "mid_rows" in entry:
        columns, groups, pair, resident, splits = map(int, entry["mid_rows"])
        shape = MidRowsShape(Cut(columns, groups, pair, resident), splits)
        way = MidRowsWay(shape, float(entry["microseconds"]))
    else:
        way = _read_gemv(entry)
    return (product, int(entry["rows"])), way


def _read_fused(entry: dict[str, Any]) -> tuple[tuple[FusedProduct, int], GemvWay]:
    product = FusedProduct(Kind[entry["kind"]], int(entry["n"]), int(entry["k"]), Epilogue[entry["epilogue"]])
    return (product, int(entry["rows"])), _read_gemv(entry)


def _read_gemv(entry: dict[str, Any]) -> GemvWay:
    k_warps, columns, unroll, resident = map(int, entry["gemv"])
    return GemvWay(GemvShape(k_warps, columns, unroll, resident), float(entry["microseconds"]))
