"""Every architecture's tiny model gives the reference's tokens in float32."""

from __future__ import annotations

import pytest
import torch

from baton.engine.native.decoder import NativeDecoder
from tests.unit.engine.native.steps import Cache, chunked, greedy
from tests.unit.engine.native.tiny_models import MODELS, cases_of, spec_of, weights_of


def test_every_architecture_has_a_tiny_model() -> None:
    assert len(MODELS) == 8


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_the_golden_ones(name: str) -> None:
    cache = Cache(NativeDecoder(spec_of(name), weights_of(name, torch.float32), torch.float32))
    for case in cases_of(name):
        tokens, logits = greedy(cache, case.prompt, len(case.output))
        assert tokens == case.output, case.id
        for token, expected in case.first_top10:
            assert float(logits[token]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_differs_from_float32_by_rounding_only(name: str) -> None:
    narrow = weights_of(name, torch.bfloat16)
    wide = {key: tensor.float() for key, tensor in narrow.items()}
    prompt = cases_of(name)[2].prompt
    rounded = chunked(Cache(NativeDecoder(spec_of(name), narrow, torch.bfloat16)), prompt, [len(prompt)])
    exact = chunked(Cache(NativeDecoder(spec_of(name), wide, torch.float32)), prompt, [len(prompt)])
    assert (rounded - exact).abs().mean() < 0.02 * exact.std()
