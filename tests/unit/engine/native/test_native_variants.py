"""The kernels of other machines, as far as this one can run them, compute the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.native.build import build
from baton.engine.native.decoder import NativeDecoder
from tests.unit.engine.native.steps import Cache, chunked, greedy
from tests.unit.engine.native.tiny_models import cases_of, spec_of, weights_of

# -march, the kernels it gives, what the CPU must have
VARIANTS = [("x86-64", "generic", "sse2"), ("x86-64-v3", "avx2", "avx2"), ("x86-64-v4", "avx512", "avx512vl")]


def library(machine: str, feature: str) -> Path:
    if feature not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU has no {feature}")
    return build(machine=machine)


@pytest.mark.parametrize(("machine", "lanes", "feature"), VARIANTS)
def test_each_variant_gives_the_golden_tokens(machine: str, lanes: str, feature: str) -> None:
    path = library(machine, feature)
    for name in ("llama-gqa-tied", "mistral-window", "qwen3-moe"):
        decoder = NativeDecoder(spec_of(name), weights_of(name, torch.float32), torch.float32, 2, path)
        assert decoder.lanes == lanes
        for case in cases_of(name)[1:3]:
            assert greedy(Cache(decoder), case.prompt, len(case.output))[0] == case.output


@pytest.mark.parametrize(("machine", "lanes", "feature"), VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_variant_is_independent_of_chunking(machine: str, lanes: str, feature: str, dtype: torch.dtype) -> None:
    path = library(machine, feature)
    decoder = NativeDecoder(spec_of("qwen3"), weights_of("qwen3", dtype), dtype, 2, path)
    prompt = cases_of("qwen3")[3].prompt[:90]
    assert torch.equal(chunked(Cache(decoder), prompt, [90]), chunked(Cache(decoder), prompt, [5])), lanes


@pytest.mark.parametrize(("machine", "lanes", "feature"), VARIANTS)
def test_each_variant_computes_the_same_bfloat16_model(machine: str, lanes: str, feature: str) -> None:
    path = library(machine, feature)
    prompt = cases_of("qwen2")[2].prompt
    weights = weights_of("qwen2", torch.bfloat16)
    wide = {key: tensor.float() for key, tensor in weights.items()}
    here = chunked(Cache(NativeDecoder(spec_of("qwen2"), weights, torch.bfloat16, 2, path)), prompt, [64])
    exact = chunked(Cache(NativeDecoder(spec_of("qwen2"), wide, torch.float32, 2, path)), prompt, [64])
    assert (here - exact).abs().mean() < 0.02 * exact.std(), lanes
