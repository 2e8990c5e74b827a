"""What rounding costs, measured on a tiny model on the CPU; and that an answer that is not the known one is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import ConfigError
from bench.accuracy import main
from bench.forced_tokens import agreement, distance
from tests.goldens import DATA

MODEL = DATA / "tiny" / "llama-gqa-untied"


def measured(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    output = tmp_path / "accuracy.json"
    status = main(["--model", str(MODEL), "--output", str(output), *words])
    return status, json.loads(output.read_text())


def test_a_tiny_model_is_exact_in_float32_and_near_it_in_bfloat16(tmp_path: Path) -> None:
    status, found = measured(tmp_path)
    assert (status, found["faults"]) == (0, [])
    free = found["free_float32"]
    assert free["tokens_in_equal_prefixes"] == free["tokens"] > 0
    assert found["bf16"]["prefill"]["tokens"] == free["tokens"]
    assert 0 < found["bf16"]["prefill"]["distance"] < 0.1


def test_an_answer_that_is_not_the_known_one_is_told(tmp_path: Path) -> None:
    known = [json.loads(line) for line in (MODEL / "golden.jsonl").read_text().splitlines()]
    known[1]["output_token_ids"][3] ^= 1
    goldens = tmp_path / "golden.jsonl"
    goldens.write_text("\n".join(map(json.dumps, known)))
    status, found = measured(tmp_path, "--goldens", str(goldens))
    assert status == 1
    assert f"float32: {known[1]['id']}: the answer is not the known one" in found["faults"]
    assert found["free_float32"]["equal_prefixes"][1] == 3
    assert any("of the known tokens are the likeliest" in fault for fault in found["faults"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--goldens /nowhere.jsonl", "--goldens /nowhere.jsonl: no such file"),
        ("--formats kv", "--formats needs --device cuda, got 'cpu'"),
        ("--device cuda --formats half", "--formats must be of weights, kv, both, got 'half'"),
    ],
)
def test_bad_options_are_named(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        main(["--model", str(MODEL), *words.split()])
    assert raised.value.message == said


def test_agreement_counts_likeliest_tokens_and_distance_is_relative() -> None:
    logits = torch.tensor([[0.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    found = agreement(logits, [1, 1, 1])
    assert (found.tokens, found.same) == (3, 0.6667)
    assert distance(logits * 1.5, logits) == pytest.approx(0.5)
    assert not distance(logits * float("nan"), logits) <= 1e9
