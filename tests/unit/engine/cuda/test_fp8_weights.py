"""Rounding weights to e4m3: what is rounded, how far, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from baton.core.errors import ConfigError
from baton.engine.cuda.fp8_weights import check_fp8, load_fp8, quantize_channels, stored_bytes
from baton.engine.models.registry import by_name
from baton.engine.weights.load import open_weights
from baton.engine.weights.source import load_spec
from tests.goldens import DATA

MODEL = "random:smollm2-135m"
HALF_STEP = 2.0**-4  # of e4m3, relative: three bits of mantissa


def test_every_channel_uses_the_whole_range_and_loses_half_a_step_at_most() -> None:
    weight = torch.randn(48, 160, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight *= torch.logspace(-6, 6, 48)[:, None]
    values, scale = quantize_channels(weight)
    restored, wanted = values.float() * scale[:, None], weight.float()
    assert (values.float().abs().amax(dim=1) == 448).all()
    smallest_normal = scale[:, None] * 2.0**-6
    assert ((restored - wanted).abs() <= HALF_STEP * wanted.abs().maximum(smallest_normal)).all()


def test_a_channel_of_zeros_stays_zero() -> None:
    values, scale = quantize_channels(torch.zeros(2, 16, dtype=torch.bfloat16))
    assert not (values.float() * scale[:, None]).any()
    assert scale.isfinite().all()


def test_the_layers_products_are_rounded_and_nothing_else() -> None:
    spec = load_spec(MODEL)
    with open_weights(MODEL, spec, torch.bfloat16) as weights:
        loaded = load_fp8(weights)
        rounded = {name for name, tensor in loaded.items() if tensor.dtype == torch.float8_e4m3fn}
        products = {f"layers.{i}.{p}.weight" for i in range(spec.layers) for p in ("qkv", "output", "gate_up", "down")}
        assert rounded == products
        assert all(torch.equal(loaded[name], weights[name]) for name in weights if name not in products)
    layouts = list(by_name(spec.architecture).tensors(spec))
    assert sum(tensor.nbytes for tensor in loaded.values()) == sum(
        stored_bytes(layout.name, layout.shape) for layout in layouts
    )
    assert sum(loaded[name].numel() for name in products) == sum(
        math.prod(layout.shape) for layout in layouts if layout.name in products
    )


def test_a_mixture_of_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.weight_format: must be auto for a mixture of experts .*'fp8'"):
        check_fp8(load_spec(str(DATA / "tiny" / "mixtral")))
