"""GGUF files become the Hugging Face directory they stand for, value by value; damaged ones are refused by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from safetensors.torch import load_file

from baton.core.errors import ModelError
from baton.engine.weights.gguf import convert_weights
from baton.engine.weights.load import load_weights
from baton.engine.weights.source import load_spec

DATA = Path(__file__).parents[3] / "data"
# Blocks of the K-quantisations hold 256 values, so rows do too.
HIDDEN, FFN, HEADS, KV_HEADS, HEAD, VOCAB = 256, 512, 8, 4, 32, 40
WRITABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_BLOCK_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}

Tensors = dict[str, tuple[np.ndarray, Quantization]]


def shapes(architecture: str, *, tied: bool) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD, KV_HEADS * HEAD
    layer = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (q, HIDDEN),
        "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN),
        "attn_output.weight": (HIDDEN, q),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (FFN, HIDDEN),
        "ffn_up.weight": (FFN, HIDDEN),
        "ffn_down.weight": (HIDDEN, FFN),
    }
    if architecture == "qwen2":
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if architecture == "qwen3":
        layer |= {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
    outer: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        outer["output.weight"] = (VOCAB, HIDDEN)
    return outer | {f"blk.0.{name}": shape for name, shape in layer.items()}


def draw(shape: tuple[int, ...], kind: Quantization, generator: np.random.Generator) -> np.ndarray:
    """Data of one tensor, as it lies in the file. The package cannot quantise to K-quantisations: draw blocks."""
    values = generator.standard_normal(shape, dtype=np.float32)
    if kind.name not in K_BLOCK_BYTES:
        return gguf.quantize(values, kind)
    size = K_BLOCK_BYTES[kind.name]
    blocks = generator.integers(0, 256, (shape[0], shape[1] // 256, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
    if kind.name == "Q6_K":
        blocks[..., -2:] = scale
    else:
        blocks[..., :2] = blocks[..., 2:4] = scale
    return blocks.reshape(shape[0], -1)


def tensors_of(architecture: str, kind: str = "F32", *, tied: bool = True) -> Tensors:
    generator = np.random.default_rng(7)
    drawn: Tensors = {}
    for name, shape in shapes(architecture, tied=tied).items():
        stored = Quantization[kind] if len(shape) == 2 else Quantization.F32
        drawn[name] = (draw(shape, stored, generator), stored)
    return drawn


def write(path: Path, architecture: str, tensors: Tensors, change: Callable[[Any], None] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    writer.add_eos_token_id(3)
    writer.add_bos_token_id(1)
    if change is not None:
        change(writer)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quietly(_done: int, _total: int) -> None:
    pass


def convert(tmp_path: Path, architecture: str, tensors: Tensors, change: Callable[[Any], None] | None = None) -> Path:
    path = write(tmp_path / "model.gguf", architecture, tensors, change)
    convert_weights(path, tmp_path / "converted", quietly)
    return tmp_path / "converted"


def values(tensors: Tensors, name: str) -> torch.Tensor:
    """What the package dequantises, rounded to bfloat16 by torch."""
    data, kind = tensors[name]
    return torch.from_numpy(np.array(gguf.dequantize(data, kind))).to(torch.bfloat16)


def half_split(interleaved: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama's row order head by head: rows 0, 2, 4, ... of a head, then rows 1, 3, 5, ..."""
    by_head = interleaved.unflatten(0, (heads, -1))
    return torch.cat((by_head[:, 0::2], by_head[:, 1::2]), dim=1).flatten(0, 1)


@pytest.mark.parametrize("kind", [*WRITABLE, *K_BLOCK_BYTES])
def test_every_quantisation_gives_the_dequantised_values(tmp_path: Path, kind: str) -> None:
    tensors = tensors_of("llama", kind)
    stored = load_file(convert(tmp_path, "llama", tensors) / "model.safetensors")
    assert len(stored) == len(tensors)
    layer = "model.layers.0"
    assert torch.equal(stored["model.embed_tokens.weight"], values(tensors, "token_embd.weight"))
    assert torch.equal(stored[f"{layer}.mlp.down_proj.weight"], values(tensors, "blk.0.ffn_down.weight"))
    assert torch.equal(stored[f"{layer}.input_layernorm.weight"], values(tensors, "blk.0.attn_norm.weight"))
    assert torch.equal(stored[f"{layer}.self_attn.v_proj.weight"], values(tensors, "blk.0.attn_v.weight"))
    q, k = values(tensors, "blk.0.attn_q.weight"), values(tensors, "blk.0.attn_k.weight")
    assert torch.equal(stored[f"{layer}.self_attn.q_proj.weight"], half_split(q, HEADS))
    assert torch.equal(stored[f"{layer}.self_attn.k_proj.weight"], half_split(k, KV_HEADS))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_rows_stay_where_they_are(tmp_path: Path, architecture: str) -> None:
    tensors = tensors_of(architecture)
    stored = load_file(convert(tmp_path, architecture, tensors) / "model.safetensors")
    assert torch.equal(stored["model.layers.0.self_attn.q_proj.weight"], values(tensors, "blk.0.attn_q.weight"))
    extra = {
        "qwen2": ("self_attn.k_proj.bias", "attn_k.bias"),
        "qwen3": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    }
    ours, theirs = extra[architecture]
    assert torch.equal(stored[f"model.layers.0.{ours}"], values(tensors, f"blk.0.{theirs}"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_directory_loads_as_the_model_that_the_file_describes(tmp_path: Path, architecture: str) -> None:
    directory = convert(tmp_path, architecture, tensors_of(architecture, tied=False))
    spec = load_spec(directory)
    assert (spec.architecture, spec.heads, spec.kv_heads, spec.head_dim) == (architecture, HEADS, KV_HEADS, HEAD)
    assert (spec.vocab_size, spec.context_length, spec.layers, spec.tied_head) == (VOCAB, 128, 1, False)
    assert (spec.norm_eps, spec.rope.theta) == (1e-5, 5e5)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((3,), 1)
    assert load_weights(directory, spec, torch.bfloat16)["head.weight"].shape == (VOCAB, HIDDEN)


def test_a_chat_turn_may_end_with_a_token_of_its_own(tmp_path: Path) -> None:
    directory = convert(tmp_path, "llama", tensors_of("llama"), lambda writer: writer.add_eot_token_id(5))
    assert load_spec(directory).eos_token_ids == (3, 5)


def test_rounds_halves_to_even(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    embedding, kind = tensors["token_embd.weight"]
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF818000], dtype=np.uint32)
    embedding[0, :4] = bits.view(np.float32)
    tensors["token_embd.weight"] = (embedding, kind)
    stored = load_file(convert(tmp_path, "llama", tensors) / "model.safetensors")["model.embed_tokens.weight"]
    found = stored[0, :4].view(torch.int16).tolist()
    assert [value & 0xFFFF for value in found] == [0x3F80, 0x3F82, 0x3F81, 0xBF82]


def test_a_second_copy_of_a_tied_embedding_is_merged_into_the_finer_one(tmp_path: Path) -> None:
    tensors = tensors_of("qwen2", tied=False)
    plain = np.random.default_rng(1).standard_normal((VOCAB, HIDDEN), dtype=np.float32)
    tensors["token_embd.weight"] = (gguf.quantize(plain, Quantization.Q4_0), Quantization.Q4_0)
    tensors["output.weight"] = (gguf.quantize(plain, Quantization.Q8_0), Quantization.Q8_0)
    directory = convert(tmp_path, "qwen2", tensors)
    assert load_spec(directory).tied_head
    stored = load_file(directory / "model.safetensors")
    assert torch.equal(stored["model.embed_tokens.weight"], values(tensors, "output.weight"))
    assert "lm_head.weight" not in stored


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_divisors_become_llama3_scaling(tmp_path: Path, factor: float) -> None:
    tensors = tensors_of("llama") | {"rope_freqs.weight": (llama3_divisors(factor), Quantization.F32)}
    scaling = load_spec(convert(tmp_path, "llama", tensors)).rope.scaling
    assert scaling is not None
    assert (scaling.factor, scaling.original_context) == (factor, 8192)


def llama3_divisors(factor: float) -> np.ndarray:
    """As llama.cpp writes them, dimension pair by dimension pair."""
    divisors: list[float] = []
    for pair in range(HEAD // 2):
        wavelength = 2 * np.pi * 5e5 ** (2 * pair / HEAD)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_refuses_rope_divisors_it_does_not_know(tmp_path: Path) -> None:
    tensors = tensors_of("llama") | {"rope_freqs.weight": (llama3_divisors(5.0), Quantization.F32)}
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        convert(tmp_path, "llama", tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda writer: writer.add_expert_count(8), ("llama.expert_count",)),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), ("rope.scaling.type", "yarn")),
        (lambda writer: writer.add_rope_dimension_count(16), ("rope.dimension_count", "32")),
    ],
)
def test_refuses_metadata_it_cannot_honour(
    tmp_path: Path, change: Callable[[Any], None], words: tuple[str, ...]
) -> None:
    with pytest.raises(ModelError) as caught:
        convert(tmp_path, "llama", tensors_of("llama"), change)
    assert all(word in caught.value.message for word in (*words, "model.gguf"))


def test_refuses_an_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"general\.architecture: unsupported value 'gemma', supported: llama"):
        convert(tmp_path, "gemma", tensors_of("llama"))


def test_refuses_an_unsupported_quantisation_naming_tensor_and_type(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    blocks = np.zeros((HIDDEN, FFN // 256 * 84), dtype=np.uint8)
    tensors["blk.0.ffn_down.weight"] = (blocks, Quantization.Q2_K)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_down\.weight: unsupported type Q2_K, supported: .*Q4_K"):
        convert(tmp_path, "llama", tensors)


def test_names_a_missing_an_unexpected_and_a_misshapen_tensor(tmp_path: Path) -> None:
    without = {name: tensor for name, tensor in tensors_of("llama").items() if name != "blk.0.ffn_up.weight"}
    with pytest.raises(ModelError, match=r"tensor missing: blk\.0\.ffn_up\.weight"):
        convert(tmp_path, "llama", without)
    extra = tensors_of("llama") | {"blk.1.ffn_up.weight": tensors_of("llama")["blk.0.ffn_up.weight"]}
    with pytest.raises(ModelError, match=r"unexpected tensor blk\.1\.ffn_up\.weight"):
        convert(tmp_path, "llama", extra)
    short = tensors_of("llama") | {"output_norm.weight": (np.ones(HIDDEN - 1, dtype=np.float32), Quantization.F32)}
    with pytest.raises(ModelError, match=r"output_norm\.weight: expected shape \[256\], got \[255\]"):
        convert(tmp_path, "llama", short)


def test_refuses_values_that_are_not_finite_and_leaves_nothing_behind(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    tensors["blk.0.ffn_up.weight"][0][3, 5] = np.inf
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight: corrupt"):
        convert(tmp_path, "llama", tensors)
    assert list((tmp_path / "converted").iterdir()) == []


@pytest.mark.parametrize("keep", [0.0, 0.0001, 0.001, 0.01, 0.3, 0.9, 0.99999])
def test_refuses_a_truncated_file_by_name(tmp_path: Path, keep: float) -> None:
    path = write(tmp_path / "model.gguf", "llama", tensors_of("llama"))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ModelError, match=r"model\.gguf: truncated or not a GGUF file"):
        convert_weights(path, tmp_path / "converted", quietly)


def test_refuses_a_file_of_another_kind_and_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" * 1000)
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert_weights(tmp_path / "model.gguf", tmp_path / "converted", quietly)
    with pytest.raises(ModelError, match=r"absent\.gguf: file missing"):
        convert_weights(tmp_path / "absent.gguf", tmp_path / "converted", quietly)


def test_reports_progress_up_to_the_end(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", tensors_of("llama"))
    seen: list[tuple[int, int]] = []
    convert_weights(path, tmp_path / "converted", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    total = 2 * sum(int(np.prod(shape)) for shape in shapes("llama", tied=True).values())
    assert (seen[0], seen[-1]) == ((0, total), (total, total))


def test_two_conversions_at_once_leave_one_sound_directory(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", tensors_of("llama"))
    directory = tmp_path / "converted"
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(lambda _: convert_weights(path, directory, quietly), range(4)))
    assert sorted(file.name for file in directory.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    load_weights(directory, load_spec(directory), torch.bfloat16)


def test_the_default_model_equals_the_reference_byte_for_byte(smollm2_directory: Path) -> None:
    reference = json.loads((DATA / "meta.json").read_text())["models"]["smollm2-135m-instruct"]
    with (smollm2_directory / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == reference["model.safetensors"]
