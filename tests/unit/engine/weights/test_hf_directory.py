"""Model directories load into canonical tensors; damaged ones are refused by file and tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import ConfigError, ModelError
from baton.engine.decoder import Weights
from baton.engine.weights.load import load_weights, open_weights
from baton.engine.weights.source import load_spec, preset_names, weights_hash

TINY = Path(__file__).parents[3] / "data" / "tiny"


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(directory, load_spec(directory), dtype)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(TINY / "qwen2", tmp_path / "model"))


def rewrite(model: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors (None removes); ``__`` in a name stands for a dot."""
    tensors = load_file(model / "model.safetensors")
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    save_file(tensors, model / "model.safetensors")


def shard(model: Path) -> list[Path]:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    parts = [dict(list(tensors.items())[start::2]) for start in (0, 1)]
    files = [model / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for part, file in zip(parts, files, strict=True):
        save_file(part, file)
    weight_map = {name: file.name for part, file in zip(parts, files, strict=True) for name in part}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


def test_fuses_rows_in_the_canonical_order(model: Path) -> None:
    stored, weights = load_file(model / "model.safetensors"), load(model)
    prefix = "model.layers.1"
    qkv = [stored[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(weights["layers.1.qkv.weight"], torch.cat(qkv))
    bias = [stored[f"{prefix}.self_attn.{part}_proj.bias"] for part in "qkv"]
    assert torch.equal(weights["layers.1.qkv.bias"], torch.cat(bias))
    gate_up = [stored[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(weights["layers.1.gate_up.weight"], torch.cat(gate_up))
    assert "head.weight" not in weights


def test_stacks_experts_gate_before_up() -> None:
    stored, weights = load_file(TINY / "mixtral" / "model.safetensors"), load(TINY / "mixtral")
    experts = weights["layers.0.experts.gate_up.weight"]
    assert experts.shape == (4, 192, 128)
    name = "model.layers.0.block_sparse_moe.experts.2.w{}.weight"
    assert torch.equal(experts[2], torch.cat([stored[name.format(1)], stored[name.format(3)]]))
    assert torch.equal(weights["layers.0.experts.down.weight"][3], stored[name.format(2).replace("s.2", "s.3")])


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_converts_every_stored_dtype(model: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors")
    norm = load(model, wanted)["final_norm.weight"]
    assert torch.equal(norm, tensors["model.norm.weight"].to(wanted))


def test_shards_give_the_same_weights_as_one_file(model: Path) -> None:
    whole = load(model)
    shard(model)
    sharded = load(model)
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_open_weights_are_read_on_access_and_hold_the_same(model: Path) -> None:
    loaded, spec = load(model), load_spec(model)
    with open_weights(model, spec, torch.float32) as weights:
        assert "layers.0.qkv.weight" in weights
        assert "layers.9.qkv.weight" not in weights
        assert len(weights) == len(loaded)
        assert weights["embed.weight"] is not weights["embed.weight"]
        assert all(torch.equal(weights[name], loaded[name]) for name in weights)


def test_names_a_missing_shard(model: Path) -> None:
    shard(model)[1].unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: file missing"):
        load(model)


def test_refuses_an_index_that_leaves_the_directory(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))
    with pytest.raises(ModelError, match=r"weight_map: a: .*'\.\./b\.safetensors'"):
        load(model)


@pytest.mark.parametrize("keep", [0, 4, 100, 4096, -1])
def test_names_a_truncated_file(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated or not a safetensors file"):
        load(model)


def test_names_a_missing_file_and_a_missing_directory(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: file missing"):
        load(model)
    with pytest.raises(ModelError, match="nowhere: no such model directory"):
        load_spec(model / "nowhere")
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: file missing"):
        load_spec(model)


def test_names_a_missing_tensor(model: Path) -> None:
    rewrite(model, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match=r"tensor missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(model)


def test_names_a_wrong_shape_with_the_expected_one(model: Path) -> None:
    rewrite(model, model__norm__weight=torch.zeros(191))
    with pytest.raises(ModelError, match=r"model\.norm\.weight: expected shape \[192\], got \[191\]"):
        load(model)


def test_names_an_unsupported_stored_dtype(model: Path) -> None:
    rewrite(model, model__norm__weight=torch.zeros(192, dtype=torch.float64))
    with pytest.raises(ModelError, match=r"model\.norm\.weight: unsupported dtype F64"):
        load(model)


def test_refuses_a_tensor_that_nothing_would_read(model: Path) -> None:
    rewrite(model, model__layers__0__self_attn__o_proj__bias=torch.zeros(192))
    with pytest.raises(ModelError, match=r"unexpected tensor model\.layers\.0\.self_attn\.o_proj\.bias"):
        load(model)


def test_tolerates_derived_tensors_and_a_copy_of_a_tied_head(model: Path) -> None:
    head = load_file(model / "model.safetensors")["model.embed_tokens.weight"].clone()
    rewrite(model, lm_head__weight=head, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(32))
    assert "head.weight" not in load(model)


def test_refuses_other_dtypes_than_float32_and_bfloat16() -> None:
    with pytest.raises(ConfigError, match="float16"):
        load(TINY / "qwen2", torch.float16)


def test_hash_follows_content_and_meaning_not_place(model: Path, tmp_path: Path) -> None:
    first = weights_hash(model)
    assert len(first) == 32
    assert weights_hash(shutil.copytree(model, tmp_path / "elsewhere")) == first
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert weights_hash(model) != first
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    assert weights_hash(model) == first
    rewrite(model, model__norm__weight=torch.ones(192))
    assert weights_hash(model) != first


def test_a_kept_hash_is_used_until_the_file_changes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.weights.source._WORTH_CACHING", 0)
    first = weights_hash(model)
    kept = model / ".baton-weights-hash.json"
    kept.write_text(kept.read_text().replace(json.loads(kept.read_text())["hash"], "0" * 64))
    assert weights_hash(model) != first  # so it is read
    rewrite(model, model__norm__weight=torch.ones(192))
    changed = weights_hash(model)
    kept.unlink()
    assert weights_hash(model) == changed
    kept.write_text("damaged")
    assert weights_hash(model) == changed


def test_random_weights_follow_from_name_and_seed() -> None:
    spec = load_spec("random:tiny-llama")
    first, again, other = (load_weights("random:tiny-llama", spec, torch.float32, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layers.0.qkv.weight"], other["layers.0.qkv.weight"])
    assert not torch.equal(first["layers.0.down.weight"], first["layers.1.down.weight"])
    narrow = load_weights("random:tiny-llama", spec, torch.bfloat16, seed=1)
    assert all(torch.equal(first[name], narrow[name].float()) for name in first)
    hashes = {weights_hash("random:tiny-llama", seed) for seed in (1, 1, 2)}
    assert len(hashes) == 2


def test_weights_rounded_at_load_are_other_weights() -> None:
    assert weights_hash("random:tiny-llama", 1, "auto") == weights_hash("random:tiny-llama", 1)
    assert weights_hash("random:tiny-llama", 1, "fp8") != weights_hash("random:tiny-llama", 1)


def test_random_takes_presets_and_config_files() -> None:
    assert {"tiny-llama", "llama-3-8b", "qwen3-0.6b", "smollm2-135m"} <= set(preset_names())
    assert load_spec("random:llama-3-8b").kv_bytes_per_token(2) == 128 * 1024
    path = TINY / "qwen3-moe" / "config.json"
    spec = load_spec(f"random:{path}")
    assert spec == load_spec(TINY / "qwen3-moe")
    assert load_weights(f"random:{path}", spec, torch.bfloat16).keys() == load(TINY / "qwen3-moe").keys()
    with pytest.raises(ModelError, match=r"random:absent: .*tiny-llama"):
        load_spec("random:absent")
