"""What a model file provides, and the parts that most decoder-only transformers share.

An ``Architecture`` turns a ``config.json`` into a ``DecoderSpec`` and says, for every canonical tensor of
``baton.engine.decoder``, which checkpoint tensors make it up. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.engine.models.hf_config import HfConfig, read_rope
from baton.engine.spec import DecoderSpec, MoeSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor as it lies in the checkpoint."""

    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One canonical tensor: its sources in order, concatenated along their rows and viewed as ``shape``."""

    name: str
    shape: Shape
    sources: tuple[SourceTensor, ...]

    def __post_init__(self) -> None:
        parts = sum(math.prod(source.shape) for source in self.sources)
        if parts != math.prod(self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} does not hold the {parts} elements of its sources")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a mixture of experts keeps its weights, below ``model.layers.{i}.``; ``{e}`` is the expert."""

    router: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Architecture:
    """One ``model_type``: how to read its config and where its tensors are."""

    model_type: str
    read_spec: Callable[[HfConfig], DecoderSpec]
    experts: ExpertNames | None = None

    def tensors(self, spec: DecoderSpec) -> Iterator[TensorLayout]:
        """Every canonical tensor of ``spec``, layer by layer in the order in which the forward pass needs them."""
        yield _single("embed.weight", "model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
        for layer in range(spec.layers):
            yield from _attention(spec, layer)
            if spec.moe is None:
                yield from _feed_forward(spec, layer)
            else:
                yield from self._mixture(spec, spec.moe, layer)
        yield _single("final_norm.weight", "model.norm.weight", (spec.hidden_size,))
        if not spec.tied_head:
            yield _single("head.weight", "lm_head.weight", (spec.vocab_size, spec.hidden_size))

    def _mixture(self, spec: DecoderSpec, moe: MoeSpec, layer: int) -> Iterator[TensorLayout]:
        if self.experts is None:
            raise ValueError(f"architecture {self.model_type} has no mixture of experts")
        names = self.experts
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        wide, narrow = (moe.ffn_size, spec.hidden_size), (spec.hidden_size, moe.ffn_size)
        yield _single(f"{ours}.router.weight", f"{theirs}.{names.router}", (moe.experts, spec.hidden_size))
        gate_up = [
            SourceTensor(f"{theirs}.{pattern.format(e=expert)}", wide)
            for expert in range(moe.experts)
            for pattern in (names.gate, names.up)
        ]
        shape = (moe.experts, 2 * moe.ffn_size, spec.hidden_size)
        yield TensorLayout(f"{ours}.experts.gate_up.weight", shape, tuple(gate_up))
        down = [SourceTensor(f"{theirs}.{names.down.format(e=expert)}", narrow) for expert in range(moe.experts)]
        yield TensorLayout(f"{ours}.experts.down.weight", (moe.experts, *narrow), tuple(down))


def common_spec(
    config: HfConfig, architecture: str, *, default_theta: float = 10_000.0, default_head_dim: int | None = None
) -> DecoderSpec:
    """The fields that all Llama-like configs share; a model file adds what is its own with ``dataclasses.replace``."""
    config.require("hidden_act", ("silu", "swish"), default="silu")
    if config.has("quantization_config"):
        raise config.error("quantization_config", "quantised checkpoints are not supported")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads {heads}, got {kv_heads}")
    vocab_size = config.size("vocab_size")
    bos = config.token_ids("bos_token_id", vocab_size)
    return DecoderSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        context_length=config.size("max_position_embeddings"),
        hidden_size=hidden,
        ffn_size=config.size("intermediate_size"),
        layers=config.size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(config, hidden, heads, default_head_dim),
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        rope=read_rope(config, default_theta),
        tied_head=config.flag("tie_word_embeddings"),
        eos_token_ids=config.token_ids("eos_token_id", vocab_size),
        bos_token_id=bos[0] if bos else None,
    )


def gated_window(config: HfConfig, layers: int) -> int | None:
    """Qwen's sliding window: off unless ``use_sliding_window``; Baton takes one window for all layers or none."""
    if not config.flag("use_sliding_window"):
        return None
    full_layers = config.values.get("max_window_layers")
    if isinstance(full_layers, int) and full_layers >= layers:
        return None
    if full_layers not in (0, None):
        raise config.error("max_window_layers", f"must be 0 or at least num_hidden_layers {layers}, got {full_layers}")
    return config.size("sliding_window")


def read_experts(config: HfConfig, *count_names: str, ffn_size: int, renormalize: bool) -> MoeSpec:
    """The mixture of experts; ``count_names`` are the fields that may hold the number of experts."""
    experts, top_k = config.size(*count_names), config.size("num_experts_per_tok")
    if top_k > experts:
        raise config.error("num_experts_per_tok", f"must be at most the number of experts {experts}, got {top_k}")
    return MoeSpec(experts, top_k, ffn_size, renormalize)


def _head_dim(config: HfConfig, hidden: int, heads: int, default: int | None) -> int:
    head_dim = config.optional_size("head_dim") or default
    if head_dim is None:
        if hidden % heads:
            raise config.error("num_attention_heads", f"must divide hidden_size {hidden}, got {heads}")
        head_dim = hidden // heads
    if head_dim % 2:
        raise config.error("head_dim", f"must be even for RoPE, got {head_dim}")
    return head_dim


def _single(name: str, source: str, shape: Shape) -> TensorLayout:
    return TensorLayout(name, shape, (SourceTensor(source, shape),))


def _attention(spec: DecoderSpec, layer: int) -> Iterator[TensorLayout]:
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    rows = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
    qkv_rows = spec.q_size + 2 * spec.kv_size
    yield _single(f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight", (spec.hidden_size,))
    yield TensorLayout(
        f"{ours}.qkv.weight",
        (qkv_rows, spec.hidden_size),
        tuple(SourceTensor(f"{theirs}.self_attn.{name}.weight", (n, spec.hidden_size)) for name, n in rows.items()),
    )
    if spec.qkv_bias:
        sources = tuple(SourceTensor(f"{theirs}.self_attn.{name}.bias", (n,)) for name, n in rows.items())
        yield TensorLayout(f"{ours}.qkv.bias", (qkv_rows,), sources)
    if spec.qk_norm:
        yield _single(f"{ours}.q_norm.weight", f"{theirs}.self_attn.q_norm.weight", (spec.head_dim,))
        yield _single(f"{ours}.k_norm.weight", f"{theirs}.self_attn.k_norm.weight", (spec.head_dim,))
    yield _single(f"{ours}.output.weight", f"{theirs}.self_attn.o_proj.weight", (spec.hidden_size, spec.q_size))
    if spec.output_bias:
        yield _single(f"{ours}.output.bias", f"{theirs}.self_attn.o_proj.bias", (spec.hidden_size,))
    yield _single(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", (spec.hidden_size,))


def _feed_forward(spec: DecoderSpec, layer: int) -> Iterator[TensorLayout]:
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}.mlp"
    gate_up = ("gate_proj", "up_proj")
    yield TensorLayout(
        f"{ours}.gate_up.weight",
        (2 * spec.ffn_size, spec.hidden_size),
        tuple(SourceTensor(f"{theirs}.{name}.weight", (spec.ffn_size, spec.hidden_size)) for name in gate_up),
    )
    yield _single(f"{ours}.down.weight", f"{theirs}.down_proj.weight", (spec.hidden_size, spec.ffn_size))
    if spec.mlp_bias:
        sources = tuple(SourceTensor(f"{theirs}.{name}.bias", (spec.ffn_size,)) for name in gate_up)
        yield TensorLayout(f"{ours}.gate_up.bias", (2 * spec.ffn_size,), sources)
        yield _single(f"{ours}.down.bias", f"{theirs}.down_proj.bias", (spec.hidden_size,))
