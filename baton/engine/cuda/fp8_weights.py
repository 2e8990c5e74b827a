"""Weights in e4m3 with one float32 scale for every output channel, rounded when they are loaded, tensor by tensor.

Rounded are the products of the layers, experts among them, which are nearly all of a step's bytes. The head stays in
bf16: rounding it alone changes as many of smollm2's answers as rounding all layers does (the errors meet the logits
directly), for a twelfth of a decode step's time at batch 1 and less in larger ones. So does the router of a mixture: it
is small, and decides which experts a row meets. The embedding is looked up, not multiplied with.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baton.core.errors import ConfigError
from baton.engine.cuda.kernels import E4M3_MAX
from baton.engine.decoder import Weights
from baton.engine.spec import DecoderSpec

PRODUCTS = ("qkv", "output", "gate_up", "down")  # of a mixture the last two are ``experts.gate_up``, ``experts.down``
_SUFFIXES = tuple(f".{name}.weight" for name in PRODUCTS)
_MULTIPLE = 16  # elements: what FP8 products need of both sizes of a weight
_SMALLEST = 1e-30  # a channel of zeros needs some scale


def check_fp8(spec: DecoderSpec) -> None:
    """Raises ConfigError when the products of ``spec`` cannot be computed in FP8."""
    sizes = {
        "hidden_size": spec.hidden_size,
        **({"ffn_size": spec.ffn_size} if spec.moe is None else {"moe.ffn_size": spec.moe.ffn_size}),
        "q_size": spec.q_size,
        "q_size + 2 * kv_size": spec.q_size + 2 * spec.kv_size,
    }
    for name, size in sizes.items():
        if size % _MULTIPLE:
            raise ConfigError(
                f"engine.weight_format: fp8 needs sizes that are multiples of {_MULTIPLE}, got {name} {size}"
            )


def load_fp8(weights: Weights) -> Mapping[str, torch.Tensor]:
    """All of ``weights`` (bf16), the layers' products as e4m3, with their scales under the name ending in ``.scale``.

    Each is read once and dropped when it has been rounded, so that only one is there in both forms.
    """
    loaded: dict[str, torch.Tensor] = {}
    for name in weights:
        if name.endswith(_SUFFIXES):
            loaded[name], loaded[scale_name(name)] = quantize_channels(weights[name])
        else:
            loaded[name] = weights[name]
    return loaded


def scale_name(weight_name: str) -> str:
    """The name of the scales that belong to a weight."""
    return f"{weight_name.removesuffix('.weight')}.scale"


def quantize_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [n, k] as e4m3 [n, k] and scales float32 [n]: a channel's largest magnitude becomes e4m3's largest.

    Experts [experts, n, k] likewise, one after another: all of them in float32 would not fit beside the others.
    """
    scale = weight.abs().amax(dim=-1).float().clamp_min(_SMALLEST) / E4M3_MAX
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    matrices = ((weight, values, scale),) if weight.dim() == 2 else zip(weight, values, scale, strict=True)
    for of, rounded, by_channel in matrices:
        rounded.copy_(of.float().div_(by_channel[:, None]))
    return values, scale


def stored_bytes(name: str, shape: tuple[int, ...]) -> int:
    """What ``load_fp8`` makes of a bf16 tensor."""
    elements = torch.Size(shape).numel()
    if not name.endswith(_SUFFIXES):
        return elements * torch.bfloat16.itemsize
    return elements + elements // shape[-1] * torch.float32.itemsize
