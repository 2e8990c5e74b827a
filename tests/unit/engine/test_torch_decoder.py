"""What is particular to the torch decoder: its rotary frequencies, its exact pieces, its refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.engine import exact
from baton.engine.kvcache import allocate_pool
from baton.engine.rope import inverse_frequencies, rope_table
from baton.engine.spec import Llama3RopeScaling, RopeSpec
from baton.engine.torch_decoder import TorchDecoder
from baton.engine.weights.load import load_weights
from baton.engine.weights.source import load_spec
from tests.unit.engine.native.steps import packed

SPEC = load_spec("random:tiny-llama")


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = inverse_frequencies(RopeSpec(500_000.0), 128)
    scaled = inverse_frequencies(RopeSpec(500_000.0, Llama3RopeScaling(8.0, 1.0, 4.0, 8192)), 128)
    waves = 2 * math.pi / plain
    assert torch.equal(scaled[waves < 2048], plain[waves < 2048])
    assert torch.allclose(scaled[waves > 8192], plain[waves > 8192] / 8)
    between = (waves > 2048) & (waves < 8192)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_the_rope_table_holds_the_whole_context() -> None:
    cos, sin = rope_table(replace(SPEC, context_length=33))
    assert cos.shape == sin.shape == (33, SPEC.head_dim // 2)
    assert torch.allclose(cos.square() + sin.square(), torch.ones(()))


@pytest.mark.parametrize("columns", [1, 31, 64, 1536, 40_000])
@pytest.mark.parametrize("function", [exact.silu, exact.exp])
def test_a_row_has_the_same_bits_wherever_it_lies(
    function: Callable[[torch.Tensor], torch.Tensor], columns: int
) -> None:
    x = torch.randn(70, columns, generator=torch.Generator().manual_seed(columns))
    rows = torch.cat([function(x[row : row + 1]) for row in range(70)])
    for start, end in ((0, 70), (1, 70), (3, 20), (5, 6), (17, 66)):
        assert torch.equal(function(x[start:end]), rows[start:end])


def test_padding_adds_zero_rows_up_to_the_tile() -> None:
    x = torch.ones(17, 3)
    padded = exact.pad_rows(x, 16)
    assert padded.shape == (32, 3)
    assert torch.equal(padded[:17], x)
    assert not padded[17:].any()
    assert exact.pad_rows(padded, 16) is padded


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [384]}, r"token_ids: must be in \[0, 384\), got 384 to 384"),
        ({"ids": [-1]}, r"token_ids: must be in \[0, 384\), got -1 to -1"),
        ({"positions": [32]}, r"positions: must be in \[0, 32\), got 32 to 32"),
        ({"tables": [[0, 4]]}, r"block_tables: must be in \[0, 4\), got 0 to 4"),
        ({"rows": [1]}, r"logit_rows: must be in \[0, 1\), got 1 to 1"),
    ],
)
def test_refuses_a_step_outside_its_bounds(change: dict[str, Any], message: str) -> None:
    decoder = TorchDecoder(SPEC, load_weights("random:tiny-llama", SPEC, torch.float32), torch.float32)
    pool = allocate_pool(SPEC, 4, 16, torch.float32, torch.device("cpu"))
    fields: dict[str, Any] = {"ids": [1], "positions": [0], "starts": [0, 1], "tables": [[0, 1]], "rows": [0]}
    decoder.forward(packed(**fields), pool)
    with pytest.raises(ValueError, match=message):
        decoder.forward(packed(**(fields | change)), pool)
    with pytest.raises(ValueError, match="pool: expected"):
        decoder.forward(packed(**fields), pool[:, :1])
