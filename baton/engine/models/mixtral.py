"""Mixtral: Mistral with a mixture of experts whose chosen weights are renormalised."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.architecture import Architecture, ExpertNames, common_spec, read_experts
from baton.engine.models.hf_config import HfConfig
from baton.engine.spec import DecoderSpec


def read_spec(config: HfConfig) -> DecoderSpec:
    spec = common_spec(config, "mixtral", default_theta=1_000_000.0)
    experts = read_experts(config, "num_local_experts", "num_experts", ffn_size=spec.ffn_size, renormalize=True)
    return replace(spec, sliding_window=config.optional_size("sliding_window"), moe=experts)


_PREFIX = "block_sparse_moe"
MIXTRAL = Architecture(
    "mixtral",
    read_spec,
    ExpertNames(
        router=f"{_PREFIX}.gate.weight",
        gate=f"{_PREFIX}.experts.{{e}}.w1.weight",
        up=f"{_PREFIX}.experts.{{e}}.w3.weight",
        down=f"{_PREFIX}.experts.{{e}}.w2.weight",
    ),
)
