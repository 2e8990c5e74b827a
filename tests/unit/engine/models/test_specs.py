"""config.json of every supported architecture, in both forms, becomes the right spec; the rest is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ModelError
from baton.engine.models.hf_config import HfConfig
from baton.engine.models.registry import ARCHITECTURES, by_name, read_spec
from baton.engine.spec import DecoderSpec, Llama3RopeScaling, MoeSpec, RopeSpec

TINY = Path(__file__).parents[3] / "data" / "tiny"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def spec_of(changes: dict[str, Any], generation: dict[str, Any] | None = None) -> DecoderSpec:
    return read_spec(HfConfig(LLAMA | changes, "config.json", generation or {}))


def tiny(name: str) -> DecoderSpec:
    return read_spec(HfConfig.read(TINY / name / "config.json"))


@pytest.mark.parametrize("name", sorted(path.name for path in TINY.iterdir()))
def test_layouts_name_exactly_the_tensors_of_the_checkpoint(name: str) -> None:
    with (TINY / name / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    stored = {key: tuple(entry["shape"]) for key, entry in header.items() if key != "__metadata__"}
    spec = tiny(name)
    layouts = list(by_name(spec.architecture).tensors(spec))
    assert {source.name: source.shape for layout in layouts for source in layout.sources} == stored
    assert len({layout.name for layout in layouts}) == len(layouts)


def test_each_tiny_model_shows_the_feature_it_is_there_for() -> None:
    assert (tiny("llama-gqa-untied").head_dim, tiny("llama-gqa-untied").tied_head) == (64, False)
    assert tiny("llama-gqa-tied").tied_head
    assert tiny("llama3-rope").rope == RopeSpec(500_000.0, Llama3RopeScaling(8.0, 1.0, 4.0, 128))
    assert tiny("mistral-window").sliding_window == 48
    assert (tiny("qwen2").qkv_bias, tiny("qwen2").output_bias, tiny("qwen2").head_dim) == (True, False, 64)
    assert tiny("qwen3").qk_norm
    assert tiny("mixtral").moe == MoeSpec(4, 2, 96, renormalize=True)
    assert tiny("qwen3-moe").moe == MoeSpec(8, 2, 64, renormalize=True)


def test_both_config_forms_say_the_same() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    old = spec_of({"rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": "bfloat16"})
    new = spec_of({"rope_parameters": scaling | {"rope_theta": 5e5}, "dtype": "bfloat16"})
    assert old == new
    assert old.rope.scaling is not None
    moe = read_spec(HfConfig(QWEN3_MOE, "config.json"))
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in QWEN3_MOE.items()}
    assert read_spec(HfConfig(renamed, "config.json")) == moe


def test_absent_and_null_fields_take_their_defaults() -> None:
    spec = spec_of({"head_dim": None, "rope_scaling": None, "sliding_window": None})
    assert (spec.head_dim, spec.rope, spec.tied_head, spec.norm_eps) == (8, RopeSpec(10_000.0), False, 1e-6)
    assert spec_of({"num_key_value_heads": None}).kv_heads == 4
    assert spec_of({"model_type": "qwen3"}).head_dim == 128
    assert spec_of({"model_type": "mistral", "sliding_window": None}).sliding_window is None


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 16}, None),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, None),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, 16),
    ],
)
def test_qwen_windows_count_only_when_switched_on(changes: dict[str, Any], window: int | None) -> None:
    assert spec_of({"model_type": "qwen2"} | changes).sliding_window == window


def test_generation_config_decides_which_tokens_end_a_text() -> None:
    assert spec_of({"eos_token_id": 7}).eos_token_ids == (7,)
    assert spec_of({"eos_token_id": 7}, {"eos_token_id": [8, 9]}).eos_token_ids == (8, 9)
    assert spec_of({"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ("model_type", "gpt2", "llama")),
        ({"model_type": None}, ("model_type", "missing")),
        ({"hidden_size": None}, ("hidden_size", "missing")),
        ({"hidden_size": "32"}, ("hidden_size", "whole number", "'32'")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", "0")),
        ({"num_hidden_layers": True}, ("num_hidden_layers", "True")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "3", "4")),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, ("num_attention_heads", "32", "3")),
        ({"head_dim": 7}, ("head_dim", "even", "7")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ("rope_scaling", "rope_type", "yarn")),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ("rope_scaling", "rope_type", "linear")),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("rope_scaling", "low_freq_factor", "missing")),
        ({"rope_scaling": 8}, ("rope_scaling", "object", "8")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ("rope_parameters", "partial_rotary_factor", "0.5")),
        ({"eos_token_id": 100}, ("eos_token_id", "100")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config",)),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "'yes'")),
        (QWEN3_MOE | {"num_experts_per_tok": 9}, ("num_experts_per_tok", "8", "9")),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, ("mlp_only_layers", "[0]")),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            ("max_window_layers", "2", "1"),
        ),
    ],
)
def test_refuses_what_it_cannot_compute_naming_field_and_value(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as caught:
        spec_of(changes)
    assert "config.json" in caught.value.message
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00"])
def test_refuses_a_damaged_config_file_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        HfConfig.read(tmp_path / "config.json")


def test_every_architecture_has_a_name_of_its_own() -> None:
    assert len({architecture.model_type for architecture in ARCHITECTURES}) == len(ARCHITECTURES) == 6
