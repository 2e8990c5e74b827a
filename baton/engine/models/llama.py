"""Llama 2, 3, 3.1 and models that say ``model_type: llama`` (SmolLM2 among them)."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.architecture import Architecture, common_spec
from baton.engine.models.hf_config import HfConfig
from baton.engine.spec import DecoderSpec


def read_spec(config: HfConfig) -> DecoderSpec:
    spec = common_spec(config, "llama")
    attention_bias = config.flag("attention_bias")
    return replace(spec, qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=config.flag("mlp_bias"))


LLAMA = Architecture("llama", read_spec)
