"""Every architecture's tiny model gives the reference's tokens in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from baton.engine.models.hf_config import HfConfig
from baton.engine.models.registry import read_spec
from baton.engine.native.decoder import NativeDecoder
from baton.engine.weights.hf_directory import load_directory
from tests.unit.engine.native.steps import Cache, chunked, greedy

TINY = Path(__file__).parents[3] / "data" / "tiny"
MODELS = sorted(path.name for path in TINY.iterdir() if path.is_dir())


def load(name: str, dtype: torch.dtype) -> NativeDecoder:
    directory = TINY / name
    spec = read_spec(HfConfig(json.loads((directory / "config.json").read_text()), f"{name}/config.json"))
    return NativeDecoder(spec, load_directory(directory, spec, dtype, torch.device("cpu")), dtype)


def test_every_architecture_has_a_tiny_model() -> None:
    assert len(MODELS) == 8


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_the_golden_ones(name: str) -> None:
    cache = Cache(load(name, torch.float32))
    for line in (TINY / name / "golden.jsonl").read_text().splitlines():
        case = json.loads(line)
        tokens, logits = greedy(cache, case["prompt_token_ids"], case["max_tokens"])
        assert tokens == case["output_token_ids"], case["id"]
        for token, expected in case["first_step_top10"]:
            assert float(logits[token]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_differs_from_float32_by_rounding_only(name: str) -> None:
    directory = TINY / name
    spec = read_spec(HfConfig(json.loads((directory / "config.json").read_text()), f"{name}/config.json"))
    narrow = load_directory(directory, spec, torch.bfloat16, torch.device("cpu"))
    wide = {key: tensor.float() for key, tensor in narrow.items()}
    prompt = json.loads((directory / "golden.jsonl").read_text().splitlines()[2])["prompt_token_ids"]
    rounded = chunked(Cache(NativeDecoder(spec, narrow, torch.bfloat16)), prompt, [64])
    exact = chunked(Cache(NativeDecoder(spec, wide, torch.float32)), prompt, [64])
    assert (rounded - exact).abs().mean() < 0.02 * exact.std()
