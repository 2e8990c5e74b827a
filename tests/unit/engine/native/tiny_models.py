"""The tiny golden models as specs, weights and cases."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.engine.decoder import Weights
from baton.engine.models.hf_config import HfConfig
from baton.engine.models.registry import read_spec
from baton.engine.spec import DecoderSpec
from baton.engine.weights.hf_directory import load_directory

TINY = Path(__file__).parents[3] / "data" / "tiny"
MODELS = sorted(path.name for path in TINY.iterdir() if path.is_dir())


@dataclass(frozen=True)
class Case:
    id: str
    prompt: list[int]
    output: list[int]
    first_top10: list[tuple[int, float]]


def spec_of(name: str) -> DecoderSpec:
    config = TINY / name / "config.json"
    return read_spec(HfConfig(json.loads(config.read_text()), str(config)))


def weights_of(name: str, dtype: torch.dtype) -> Weights:
    return load_directory(TINY / name, spec_of(name), dtype, torch.device("cpu"))


def cases_of(name: str) -> list[Case]:
    lines = [json.loads(line) for line in (TINY / name / "golden.jsonl").read_text().splitlines()]
    return [Case(x["id"], x["prompt_token_ids"], x["output_token_ids"], x["first_step_top10"]) for x in lines]
