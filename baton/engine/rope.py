"""Rotary frequencies, plain and with Llama 3.1's scaling (as the Llama 3.1 release defines it)."""

from __future__ import annotations

import math

import torch

from baton.engine.spec import DecoderSpec, Llama3RopeScaling, RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2]: the angle per position of each pair of dimensions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    return plain if rope.scaling is None else _llama3(plain, rope.scaling)


def rope_table(spec: DecoderSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [context_length, head_dim / 2]."""
    positions = torch.arange(spec.context_length, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(spec.rope, spec.head_dim))
    return angles.cos(), angles.sin()


def _llama3(plain: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, the band between is blended."""
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return blend * plain + (1.0 - blend) * plain / scaling.factor
