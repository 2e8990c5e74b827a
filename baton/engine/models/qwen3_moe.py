"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.architecture import Architecture, ExpertNames, common_spec, gated_window, read_experts
from baton.engine.models.hf_config import HfConfig
from baton.engine.spec import DecoderSpec


def read_spec(config: HfConfig) -> DecoderSpec:
    config.require("decoder_sparse_step", (1,), default=1)
    config.require("mlp_only_layers", ([],), default=[])
    spec = common_spec(config, "qwen3_moe")
    experts = read_experts(
        config,
        "num_experts",
        "num_local_experts",
        ffn_size=config.size("moe_intermediate_size"),
        renormalize=config.flag("norm_topk_prob"),
    )
    attention_bias = config.flag("attention_bias")
    return replace(
        spec,
        qk_norm=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        sliding_window=gated_window(config, spec.layers),
        moe=experts,
    )


QWEN3_MOE = Architecture(
    "qwen3_moe",
    read_spec,
    ExpertNames(
        router="mlp.gate.weight",
        gate="mlp.experts.{e}.gate_proj.weight",
        up="mlp.experts.{e}.up_proj.weight",
        down="mlp.experts.{e}.down_proj.weight",
    ),
)
