"""Reads a model's weights into memory; ``baton.engine.weights.source`` says what a model name stands for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from baton.core.errors import ConfigError
from baton.engine.decoder import Weights
from baton.engine.spec import DecoderSpec
from baton.engine.weights.hf_directory import open_directory
from baton.engine.weights.random import random_weights
from baton.engine.weights.source import RANDOM_PREFIX

_CPU = torch.device("cpu")


@contextmanager
def open_weights(
    model: str | Path, spec: DecoderSpec, dtype: torch.dtype, device: torch.device = _CPU, seed: int = 0
) -> Iterator[Weights]:
    """The canonical tensors of a model directory or of ``random:CONFIG`` (drawn from ``seed``) as ``dtype``.

    Each access reads the tensor anew, so a backend that packs its own copy never has two. Raises ModelError when the
    files do not hold what ``spec`` needs, ConfigError for a dtype other than float32 and bfloat16.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"engine.dtype: must be float32 or bfloat16, got {dtype}")
    if str(model).startswith(RANDOM_PREFIX):
        yield random_weights(spec, dtype, device, seed)
        return
    with open_directory(Path(model), spec, dtype, device) as weights:
        yield weights


def load_weights(
    model: str | Path, spec: DecoderSpec, dtype: torch.dtype, device: torch.device = _CPU, seed: int = 0
) -> Weights:
    """All of ``open_weights`` in memory."""
    with open_weights(model, spec, dtype, device, seed) as weights:
        return dict(weights)
