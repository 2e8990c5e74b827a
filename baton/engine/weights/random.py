"""Random weights for tests and benchmarks, the same for a spec and seed on every machine and device, in every dtype."""

from __future__ import annotations

import hashlib
import math

import torch

from baton.engine.models.registry import by_name
from baton.engine.spec import DecoderSpec
from baton.engine.weights.on_demand import OnDemandWeights

_PIECE = 1 << 26  # elements drawn at once: bounds the scratch memory beside a large tensor


def random_weights(spec: DecoderSpec, dtype: torch.dtype, device: torch.device, seed: int = 0) -> OnDemandWeights:
    """Every canonical tensor of ``spec``: bfloat16 values, widened when ``dtype`` is float32, drawn on ``device``.

    Linear weights have variance 1 / inputs, so activations keep their scale through the layers; norms lie around 1.
    """
    layouts = by_name(spec.architecture).tensors(spec)
    return OnDemandWeights(layouts, lambda layout: _draw(layout.name, layout.shape, seed, device).to(dtype))


def _draw(name: str, shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """bfloat16 values that follow from name, ``seed`` and place alone, so the order of drawing does not matter."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest(), "little", signed=True)
    drawn = torch.empty(math.prod(shape), dtype=torch.bfloat16, device=device)
    for start in range(0, drawn.numel(), _PIECE):
        piece = drawn[start : start + _PIECE]
        # Uniform of variance 1: unlike normal draws, exact on every device.
        values = _uniform(key, start, piece.numel(), device).mul_(2.0).sub_(1.0).mul_(math.sqrt(3.0))
        if name.endswith("norm.weight"):
            values.mul_(0.1).add_(1.0)
        elif name.endswith(".bias"):
            values.mul_(0.1)
        else:
            values.mul_(1.0 / math.sqrt(shape[-1]))
        piece.copy_(values)
    return drawn.view(shape)


def _uniform(key: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """float32 [count] in [0, 1), for places ``start`` and following of the stream ``key``."""
    places = torch.arange(start, start + count, dtype=torch.int32, device=device)
    # Mixed twice: one mix of place and key would make two tensors permutations of each other, in whole rows.
    bits = _mix(_mix(places).add_(key))
    return bits.bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """A permutation of the 32-bit integers that leaves no pattern, in place (Wellons' "lowbias32")."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(factor)
    return bits.bitwise_xor_(_shifted(bits, 16))


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Shifted right with zeros coming in; torch's own shift of signed integers brings in the sign."""
    return torch.bitwise_right_shift(bits, shift).bitwise_and_((1 << (32 - shift)) - 1)
