"""The memory of measured matrix products; needs no GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.engine.cuda.cublaslt import Kind
from baton.engine.cuda.gemm_choices import Choices, FusedProduct, GemvWay, LtWay, MidRowsWay, Product
from baton.engine.cuda.gemv import Epilogue, GemvShape
from baton.engine.cuda.mid_rows import Cut, MidRowsShape

PRODUCT = Product(Kind.BF16, 6144, 4096, False)
FUSED = FusedProduct(Kind.E4M3, 6144, 4096, Epilogue.ADD)
GEMV = GemvWay(GemvShape(8, 1, 8, 2), 12.5)
LT = LtWay(bytes(range(64)), 14.25)
MID_ROWS = MidRowsWay(MidRowsShape(Cut(64, 2, 1, 2), 4), 13.0)


def some_choices() -> Choices:
    choices = Choices("NVIDIA H200", 130_000)
    choices.products = {(PRODUCT, 1): GEMV, (PRODUCT, 64): LT, (replace(PRODUCT, bias=True), 64): MID_ROWS}
    choices.fused = {(FUSED, 1): GEMV}
    return choices


def test_choices_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "choices.json"
    some_choices().save(path)
    later = Choices("NVIDIA H200", 130_000)
    later.load(path)
    assert later == some_choices()


@pytest.mark.parametrize(("device", "cublaslt"), [("NVIDIA H100", 130_000), ("NVIDIA H200", 130_001)])
def test_choices_of_another_machine_are_left_alone(tmp_path: Path, device: str, cublaslt: int) -> None:
    some_choices().save(tmp_path / "choices.json")
    later = Choices(device, cublaslt)
    later.load(tmp_path / "choices.json")
    assert later == Choices(device, cublaslt)


def test_choices_among_other_kernels_are_left_alone(tmp_path: Path) -> None:
    """What was measured without the kernels for 17 to 128 rows does not say whether they are faster."""
    some_choices().save(tmp_path / "choices.json")
    later = Choices("NVIDIA H200", 130_000, mid_rows=True)
    later.load(tmp_path / "choices.json")
    assert not later.products


@pytest.mark.parametrize("damage", [{"products": [{}]}, {"fused": 3}, {"products": [{"kind": "FP4"}]}])
def test_a_damaged_file_adds_nothing(tmp_path: Path, damage: dict[str, object]) -> None:
    path = tmp_path / "choices.json"
    some_choices().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    later = Choices("NVIDIA H200", 130_000)
    later.load(path)
    assert not later.products
    assert not later.fused


@pytest.mark.parametrize(("rows", "expected"), [(1, GEMV), (2, LT), (64, LT), (1000, LT)])
def test_rows_between_two_measurements_take_the_larger(rows: int, expected: GemvWay | LtWay) -> None:
    assert some_choices().way(PRODUCT, rows) == expected


def test_what_was_never_measured_has_no_way() -> None:
    assert some_choices().way(replace(PRODUCT, n=1), 1) is None
    assert some_choices().fused_way(replace(FUSED, kind=Kind.BF16), 1) is None
