"""Tiny models of every architecture and the real models give the reference's tokens in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from baton.engine.native.decoder import NativeDecoder
from baton.engine.weights.load import open_weights
from baton.engine.weights.source import load_spec
from tests.unit.engine.native.steps import Cache, chunked, greedy, run
from tests.unit.engine.native.tiny_models import MODELS, TINY, cases_of, spec_of, weights_of


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


def test_the_default_model_gives_the_golden_tokens_and_logprobs(smollm2_directory: Path) -> None:
    check_real_model(smollm2_directory, "smollm2-135m-instruct.jsonl", 24)


def test_the_second_model_gives_the_golden_tokens_and_logprobs(qwen_coder_directory: Path) -> None:
    check_real_model(qwen_coder_directory, "qwen2.5-coder-0.5b-instruct.jsonl", 6)


def check_real_model(directory: Path, goldens: str, cases: int) -> None:
    spec = load_spec(directory)
    with open_weights(directory, spec, torch.float32) as weights:
        decoder = NativeDecoder(spec, weights, torch.float32)
    lines = (TINY.parent / goldens).read_text().splitlines()
    assert len(lines) == cases
    for line in lines:
        case = json.loads(line)
        prompt, output = case["prompt_token_ids"], case["output_token_ids"]
        cache = Cache(decoder, blocks=len(prompt + output) // 16 + 1)
        stream = cache.stream(len(prompt + output))
        rows = [run(cache, [(stream, prompt)])[0]]
        # Feeding the golden tokens tests every position even if an earlier one were wrong.
        rows += [run(cache, [(stream, [token])])[0] for token in output[:-1]]
        assert [int(row.argmax()) for row in rows] == output, case["id"]
        for row, expected in zip(rows, case.get("logprobs") or [], strict=False):
            logprobs = row.log_softmax(-1)
            for token, value in expected["top5"]:
                assert float(logprobs[token]) == pytest.approx(value, abs=1e-3)
