"""What a decoder-only transformer is made of, as data. No torch here.

A model file in ``baton.engine.models`` turns one Hugging Face ``config.json`` into a ``DecoderSpec`` and names its
weights; every backend (torch, native C++, CUDA) runs from the spec alone. So adding a model is one file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """The frequency-dependent scaling of Llama 3.1 (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding in the half-split ("neox") layout. ``scaling`` is None for plain RoPE."""

    theta: float
    scaling: Llama3RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts in place of the dense feed-forward block.

    The router takes a softmax over all experts, keeps ``top_k`` and, with ``renormalize``, divides by their sum.
    """

    experts: int
    top_k: int
    ffn_size: int
    renormalize: bool


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape and features of one model. Sizes are counts, not bytes."""

    architecture: str
    vocab_size: int
    context_length: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    tied_head: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    moe: MoeSpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes one token takes in the KV cache: layers x (K, V) x kv_size x element size."""
        return self.layers * 2 * self.kv_size * element_bytes
