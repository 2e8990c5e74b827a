"""Loads a Hugging Face directory: one ``model.safetensors``, or shards with ``model.safetensors.index.json``.

Files are memory-mapped and each canonical tensor is filled straight from its sources, so the peak above the weights
themselves is one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from baton.core.errors import ModelError
from baton.engine.decoder import Weights
from baton.engine.models.architecture import SourceTensor, TensorLayout
from baton.engine.models.hf_config import read_json_object
from baton.engine.models.registry import by_name
from baton.engine.spec import DecoderSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_STORED_DTYPES = ("F32", "F16", "BF16")


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, sorted. Raises ModelError when one is missing."""
    index = directory / INDEX_FILE
    if not index.is_file():
        files = [directory / SINGLE_FILE]
    else:
        files = sorted({directory / name for name in _weight_map(index).values()})
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: file missing")
    return files


def load_directory(directory: Path, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read every tensor that ``spec`` needs as ``dtype`` (float32 or bfloat16) onto ``device``.

    Raises ModelError naming the file and the tensor when one is missing, unexpected, truncated, or has a shape or
    stored dtype other than expected.
    """
    layouts = list(by_name(spec.architecture).tensors(spec))
    with ExitStack() as stack:
        checkpoint = _Checkpoint(directory, stack)
        checkpoint.refuse_unexpected(layouts, spec)
        return {layout.name: checkpoint.fill(layout, dtype, device) for layout in layouts}


class _Checkpoint:
    """All files of a checkpoint, open for as long as ``stack`` is."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._file_of: dict[str, tuple[Path, Any]] = {}
        for path in checkpoint_files(directory):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: truncated or not a safetensors file: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), (path, file))

    def refuse_unexpected(self, layouts: list[TensorLayout], spec: DecoderSpec) -> None:
        """A tensor that nothing reads (a bias, say) would silently change the model: refuse it."""
        expected = {source.name for layout in layouts for source in layout.sources}
        for name in sorted(self._file_of.keys() - expected):
            if name.endswith(".rotary_emb.inv_freq") or (spec.tied_head and name == "lm_head.weight"):
                continue  # derived from the config; a copy of the embedding
            path, _ = self._file_of[name]
            raise ModelError(f"{path}: unexpected tensor {name} for architecture {spec.architecture}")

    def fill(self, layout: TensorLayout, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        flat = torch.empty(layout.shape, dtype=dtype, device=device).view(-1)
        start = 0
        for source in layout.sources:
            tensor = self._read(source)
            flat[start : start + tensor.numel()].copy_(tensor.view(-1))
            start += tensor.numel()
        return flat.view(layout.shape)

    def _read(self, source: SourceTensor) -> torch.Tensor:
        if source.name not in self._file_of:
            raise ModelError(f"{self._directory}: tensor missing: {source.name}")
        path, file = self._file_of[source.name]
        view = file.get_slice(source.name)
        shape, stored = tuple(view.get_shape()), view.get_dtype()
        if shape != source.shape:
            expected = list(source.shape)
            raise ModelError(f"{path}: tensor {source.name}: expected shape {expected}, got {list(shape)}")
        if stored not in _STORED_DTYPES:
            expected = ", ".join(_STORED_DTYPES)
            raise ModelError(f"{path}: tensor {source.name}: unsupported dtype {stored}, expected one of {expected}")
        return file.get_tensor(source.name)


def _weight_map(index: Path) -> Mapping[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map: must be an object that maps tensors to files, got {weight_map!r}")
    for tensor, name in cast("dict[str, object]", weight_map).items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index}: weight_map: {tensor}: must be a file name in this directory, got {name!r}")
    return cast("dict[str, str]", weight_map)
