"""Rounding weights to e4m3: what is rounded, how far, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from baton.core.errors import ConfigError
from baton.engine.cuda.decoder import LayerWeights
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


def test_each_expert_is_rounded_as_it_would_be_alone() -> None:
    experts = torch.randn(5, 48, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    experts *= torch.logspace(-4, 4, 5)[:, None, None]
    values, scales = quantize_channels(experts)
    assert (values.shape, scales.shape) == ((5, 48, 64), (5, 48))
    for expert, found, scale in zip(experts, values, scales, strict=True):
        alone, alone_scale = quantize_channels(expert)
        assert torch.equal(found.view(torch.uint8), alone.view(torch.uint8))
        assert torch.equal(scale, alone_scale)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_the_experts_of_a_mixture_are_rounded_and_its_router_is_not(name: str) -> None:
    spec = load_spec(str(DATA / "tiny" / name))
    check_fp8(spec)
    with open_weights(str(DATA / "tiny" / name), spec, torch.bfloat16) as weights:
        loaded = load_fp8(weights)
    rounded = {name for name, tensor in loaded.items() if tensor.dtype == torch.float8_e4m3fn}
    assert rounded == {
        f"layers.{layer}.{product}.weight"
        for layer in range(spec.layers)
        for product in ("qkv", "output", "experts.gate_up", "experts.down")
    }
    assert loaded["layers.0.router.weight"].dtype == torch.bfloat16
    layouts = list(by_name(spec.architecture).tensors(spec))
    assert sum(tensor.nbytes for tensor in loaded.values()) == sum(
        stored_bytes(layout.name, layout.shape) for layout in layouts
    )
    layer = LayerWeights.take(loaded, 1)
    assert layer.experts is not None
    assert layer.experts.gate_up.scale is loaded["layers.1.experts.gate_up.scale"]
    assert layer.experts.down.scale is not None
    assert layer.experts.down.scale.shape == layer.experts.down.weight.shape[:2]


def test_experts_that_no_fp8_product_takes_are_refused() -> None:
    spec = load_spec(str(DATA / "tiny" / "mixtral"))
    assert spec.moe is not None
    narrow = replace(spec, moe=replace(spec.moe, ffn_size=24))
    with pytest.raises(ConfigError, match=r"engine\.weight_format: fp8 needs .* of 16, got moe\.ffn_size 24"):
        check_fp8(narrow)
