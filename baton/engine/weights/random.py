"""Random weights for tests and benchmarks, the same for a spec and seed on every machine and in every dtype."""

from __future__ import annotations

import hashlib
import math

import torch

from baton.engine.models.registry import by_name
from baton.engine.spec import DecoderSpec
from baton.engine.weights.on_demand import OnDemandWeights


def random_weights(spec: DecoderSpec, dtype: torch.dtype, device: torch.device, seed: int = 0) -> OnDemandWeights:
    """Every canonical tensor of ``spec``: bfloat16 values, widened when ``dtype`` is float32.

    Linear weights have variance 1 / inputs, so activations keep their scale through the layers; norms lie around 1.
    """
    layouts = by_name(spec.architecture).tensors(spec)
    return OnDemandWeights(layouts, lambda layout: _draw(layout.name, layout.shape, seed).to(device, dtype))


def _draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor whose values follow from its name and ``seed`` alone, so the order of drawing does not matter."""
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
    # Uniform of variance 1: unlike normal draws, exact on every CPU.
    values = torch.rand(shape, generator=generator).mul_(2.0).sub_(1.0).mul_(math.sqrt(3.0))
    if name.endswith("norm.weight"):
        values.mul_(0.1).add_(1.0)
    elif name.endswith(".bias"):
        values.mul_(0.1)
    else:
        values.mul_(1.0 / math.sqrt(shape[-1]))
    return values.to(torch.bfloat16)
