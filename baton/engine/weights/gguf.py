"""Converts a GGUF file into a Hugging Face directory in bfloat16. No torch.

Values are dequantised to float32 and rounded to bfloat16, to nearest even. Files of the llama architecture store the
rows of Q and K in the order of interleaved RoPE; they go back to the half-split order here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Quantization
from gguf import GGUFReader, dequantize
from gguf.gguf_reader import ReaderTensor
from numpy.typing import NDArray

from baton.core.errors import ModelError
from baton.engine.models.architecture import SourceTensor
from baton.engine.models.hf_config import HfConfig
from baton.engine.models.registry import by_name, read_spec
from baton.engine.spec import DecoderSpec
from baton.engine.weights.gguf_metadata import ROPE_DIVISORS, GgufMetadata
from baton.engine.weights.safetensors_file import Bfloat16Tensor, write_bfloat16
from baton.engine.weights.staging import staged_file

_SUPPORTED = {
    Quantization[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
}
# Hugging Face name -> GGUF name; below a layer, without the layer's prefix.
_OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_PERMUTED = ("attn_q.", "attn_k.")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
# Two quantisations of one matrix differ by at most about this, relative; two different matrices by about 1.4.
_SAME_MATRIX = 0.3
_SAMPLED_ROWS = 256
# Elements dequantised at a time: 16 MiB of float32.
_PIECE = 4 << 20

Progress = Callable[[int, int], None]


def convert_weights(path: Path, directory: Path, progress: Progress) -> None:
    """Write config.json, generation_config.json and model.safetensors for the GGUF file ``path`` into ``directory``.

    ``progress`` receives the bytes written and the bytes in all. Each file appears whole, config.json last. Raises
    ModelError naming the file and the key or tensor that is missing, unsupported, truncated or corrupt.
    """
    reader = _open(path)
    tensors = _merge_tied({tensor.name: tensor for tensor in reader.tensors})
    metadata = GgufMetadata(path, reader)
    config = metadata.hf_config({name: _shape(tensor) for name, tensor in tensors.items()})
    spec = read_spec(HfConfig(config, str(path)))
    plan = _plan(path, spec, tensors, interleaved=metadata.architecture == "llama")
    try:
        _write(directory, config, metadata.generation_config(), plan, progress)
    except OSError as error:
        raise ModelError(f"{directory}: cannot write the converted model: {error}") from error


def _open(path: Path) -> GGUFReader:
    if not path.is_file():
        raise ModelError(f"{path}: file missing")
    try:
        return GGUFReader(path)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError, OSError) as error:
        raise ModelError(f"{path}: truncated or not a GGUF file: {error}") from error


def _merge_tied(tensors: dict[str, ReaderTensor]) -> dict[str, ReaderTensor]:
    """Some files of models with tied embeddings store the matrix twice, quantised differently: keep the finer copy."""
    embedding, head = tensors.get(_EMBEDDING), tensors.get(_HEAD)
    if embedding is None or head is None or _shape(embedding) != _shape(head):
        return tensors
    if not {embedding.tensor_type, head.tensor_type} <= _SUPPORTED:
        return tensors
    first, second = (dequantize(tensor.data[:_SAMPLED_ROWS], tensor.tensor_type) for tensor in (embedding, head))
    if not np.linalg.norm(first - second) <= _SAME_MATRIX * np.linalg.norm(first):
        return tensors
    finer = max(embedding, head, key=lambda tensor: tensor.n_bytes)
    return {name: tensor for name, tensor in tensors.items() if name != _HEAD} | {_EMBEDDING: finer}


def _plan(
    path: Path, spec: DecoderSpec, tensors: dict[str, ReaderTensor], *, interleaved: bool
) -> list[Bfloat16Tensor]:
    """Check every tensor before the first byte is written; nothing in the file may stay unread."""
    sources = [source for layout in by_name(spec.architecture).tensors(spec) for source in layout.sources]
    unread = tensors.keys() - {_gguf_name(source.name) for source in sources} - {ROPE_DIVISORS}
    if unread:
        raise ModelError(f"{path}: unexpected tensor {min(unread)} for architecture {spec.architecture}")
    plan: list[Bfloat16Tensor] = []
    for source in sources:
        name = _gguf_name(source.name)
        if name not in tensors:
            raise ModelError(f"{path}: tensor missing: {name}")
        _check(path, source, tensors[name])
        swap = interleaved and any(part in name for part in _PERMUTED)
        pieces = _pieces(path, tensors[name], spec.head_dim if swap else None)
        plan.append(Bfloat16Tensor(source.name, source.shape, pieces))
    # By name, as the safetensors library orders them: the same values then make the same file.
    return sorted(plan, key=lambda tensor: tensor.name)


def _check(path: Path, source: SourceTensor, tensor: ReaderTensor) -> None:
    if tensor.tensor_type not in _SUPPORTED:
        supported = ", ".join(sorted(kind.name for kind in _SUPPORTED))
        kind = tensor.tensor_type.name
        raise ModelError(f"{path}: tensor {tensor.name}: unsupported type {kind}, supported: {supported}")
    if _shape(tensor) != source.shape:
        expected, found = list(source.shape), list(_shape(tensor))
        raise ModelError(f"{path}: tensor {tensor.name}: expected shape {expected}, got {found}")


def _pieces(path: Path, tensor: ReaderTensor, interleaved_head: int | None) -> Iterator[NDArray[np.float32]]:
    """The values of ``tensor`` in row pieces; heads of ``interleaved_head`` rows go back to the half-split order."""
    rows, columns = tensor.shape[-1], math.prod(tensor.shape[:-1])
    head = interleaved_head or 1
    step = max(1, _PIECE // int(columns) // head) * head
    # A vector's blocks lie along its only axis, so it goes whole.
    cuts = range(0, int(rows), step) if len(tensor.shape) > 1 else (0,)
    for start in cuts:
        data = tensor.data[start : start + step] if len(tensor.shape) > 1 else tensor.data
        piece = dequantize(data, tensor.tensor_type)
        if not np.isfinite(piece).all():
            raise ModelError(
                f"{path}: tensor {tensor.name}: corrupt, rows from {start} hold values that are not finite"
            )
        if interleaved_head:
            piece = piece.reshape(-1, head // 2, 2, int(columns)).swapaxes(1, 2)
        yield np.ascontiguousarray(piece, dtype=np.float32)


def _write(
    directory: Path,
    config: dict[str, object],
    generation: dict[str, object],
    plan: list[Bfloat16Tensor],
    progress: Progress,
) -> None:
    total, done = sum(tensor.size for tensor in plan), 0
    progress(done, total)
    with staged_file(directory / "model.safetensors") as staging:
        for written in write_bfloat16(staging, plan):
            done += written
            progress(done, total)
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        with staged_file(directory / name) as staging:
            staging.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Row-major; GGUF stores the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    inner = _LAYER.fullmatch(stem)
    if inner is None:
        return f"{_OUTER_NAMES[stem]}.{kind}"
    return f"blk.{inner[1]}.{_LAYER_NAMES[inner[2]]}.{kind}"
