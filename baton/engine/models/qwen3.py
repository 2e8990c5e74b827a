"""Qwen3 dense: q and k are normalised per head before RoPE."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.architecture import Architecture, common_spec, gated_window
from baton.engine.models.hf_config import HfConfig
from baton.engine.spec import DecoderSpec


def read_spec(config: HfConfig) -> DecoderSpec:
    # The head size does not follow from hidden_size: a config that leaves it out means 128.
    spec = common_spec(config, "qwen3", default_head_dim=128)
    attention_bias = config.flag("attention_bias")
    return replace(
        spec,
        qk_norm=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        sliding_window=gated_window(config, spec.layers),
    )


QWEN3 = Architecture("qwen3", read_spec)
