"""Reads a GGUF file's metadata as the Hugging Face config that stands for the same model. No torch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from baton.core.errors import ModelError

# GGUF architecture -> Hugging Face model_type. Mistral files say "llama".
_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Llama 3.1's scaling reaches GGUF only as a tensor of divisors; these are the factors that Meta published.
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_DIVISORS = "rope_freqs.weight"


class GgufMetadata:
    """The key-value part of one file. Every getter raises ModelError naming the file and the key."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self._path = path
        self._reader = reader
        name = self._value("general.architecture")
        if not isinstance(name, str) or name not in _MODEL_TYPES:
            supported = ", ".join(_MODEL_TYPES)
            raise self.error("general.architecture", f"unsupported value {name!r}, supported: {supported}")
        self.architecture = name

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self._path}: {key}: {problem}")

    def hf_config(self, tensor_shapes: dict[str, tuple[int, ...]]) -> dict[str, object]:
        """config.json; ``tensor_shapes`` are row-major, by GGUF name."""
        if self._value(f"{self.architecture}.expert_count"):
            raise self.error(f"{self.architecture}.expert_count", "mixtures of experts are not supported in GGUF")
        heads, hidden = self._number("attention.head_count"), self._number("embedding_length")
        head_dim = self._number("attention.key_length", default=hidden // heads if heads else 0)
        if self._number("rope.dimension_count", default=head_dim) != head_dim:
            raise self.error(f"{self.architecture}.rope.dimension_count", f"must be the head size {head_dim}")
        config: dict[str, object] = {
            "model_type": _MODEL_TYPES[self.architecture],
            "vocab_size": tensor_shapes.get("token_embd.weight", (0,))[0],
            "max_position_embeddings": self._number("context_length"),
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", default=heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self._float("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._float("rope.freq_base", default=10_000.0),
            "tie_word_embeddings": "output.weight" not in tensor_shapes,
            "attention_bias": self.architecture == "llama" and "blk.0.attn_q.bias" in tensor_shapes,
            "torch_dtype": "bfloat16",
            **self.generation_config(),
        }
        scaling = self._rope_scaling(head_dim, float(str(config["rope_theta"])))
        return config | ({"rope_scaling": scaling} if scaling else {})

    def generation_config(self) -> dict[str, object]:
        """generation_config.json: the token that ends a text, and the one that ends a chat turn if it is another."""
        ids = {name: self._value(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
        ends = [token for token in dict.fromkeys((ids["eos"], ids["eot"])) if token is not None]
        bos = {} if ids["bos"] is None else {"bos_token_id": ids["bos"]}
        return bos | ({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {})

    def _rope_scaling(self, head_dim: int, theta: float) -> dict[str, object] | None:
        kind = self._value(f"{self.architecture}.rope.scaling.type")
        if kind not in (None, "none"):
            raise self.error(f"{self.architecture}.rope.scaling.type", f"unsupported value {kind!r}, supported: 'none'")
        divisors = [tensor.data for tensor in self._reader.tensors if tensor.name == ROPE_DIVISORS]
        if not divisors:
            return None
        for factor in _LLAMA3_FACTORS:
            expected = _llama3_divisors(head_dim, theta, factor)
            if divisors[0].shape == expected.shape and np.allclose(divisors[0], expected, rtol=1e-3):
                return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        raise self.error(ROPE_DIVISORS, f"no known llama3 scaling (factors {_LLAMA3_FACTORS}) has these values")

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._value(f"{self.architecture}.{key}")
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{self.architecture}.{key}", f"must be a positive whole number, got {value!r}")
        return value

    def _float(self, key: str, default: float | None = None) -> float:
        value = self._value(f"{self.architecture}.{key}")
        if value is None and default is not None:
            return default
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise self.error(f"{self.architecture}.{key}", f"must be a positive number, got {value!r}")
        return float(str(np.float32(value)))  # 1e-05, not the 9.999999747378752e-06 that a float32 widens to

    def _value(self, key: str) -> object:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()


def _llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """By how much Llama 3.1 divides each rotary frequency: 1 for short wavelengths, ``factor`` for long ones."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / (blend + (1.0 - blend) / factor)
