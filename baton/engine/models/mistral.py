"""Mistral 7B and its kin: Llama with an optional sliding window over all layers."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.architecture import Architecture, common_spec
from baton.engine.models.hf_config import HfConfig
from baton.engine.spec import DecoderSpec


def read_spec(config: HfConfig) -> DecoderSpec:
    return replace(common_spec(config, "mistral"), sliding_window=config.optional_size("sliding_window"))


MISTRAL = Architecture("mistral", read_spec)
