"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.architecture import Architecture, common_spec, gated_window
from baton.engine.models.hf_config import HfConfig
from baton.engine.spec import DecoderSpec


def read_spec(config: HfConfig) -> DecoderSpec:
    spec = common_spec(config, "qwen2")
    return replace(spec, qkv_bias=True, sliding_window=gated_window(config, spec.layers))


QWEN2 = Architecture("qwen2", read_spec)
