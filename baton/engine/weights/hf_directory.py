"""Loads a Hugging Face directory: one ``model.safetensors``, or shards with ``model.safetensors.index.json``.

Files are memory-mapped and each canonical tensor is filled straight from its sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from baton.core.errors import ModelError
from baton.engine.decoder import Weights
from baton.engine.models.architecture import SourceTensor, TensorLayout
from baton.engine.models.registry import by_name
from baton.engine.spec import DecoderSpec
from baton.engine.weights.on_demand import OnDemandWeights
from baton.engine.weights.source import checkpoint_files

_STORED_DTYPES = ("F32", "F16", "BF16")


@contextmanager
def open_directory(
    directory: Path, spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> Iterator[OnDemandWeights]:
    """Every tensor that ``spec`` needs, read as ``dtype`` (float32 or bfloat16) onto ``device`` when asked for.

    Raises ModelError naming the file and the tensor when one is unexpected, or, on access, when it is missing,
    truncated, or has a shape or stored dtype other than expected.
    """
    layouts = list(by_name(spec.architecture).tensors(spec))
    with ExitStack() as stack:
        checkpoint = _Checkpoint(directory, stack)
        checkpoint.refuse_unexpected(layouts, spec)
        yield OnDemandWeights(layouts, lambda layout: checkpoint.fill(layout, dtype, device))


def load_directory(directory: Path, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> Weights:
    """All of ``open_directory`` at once."""
    with open_directory(directory, spec, dtype, device) as weights:
        return dict(weights)


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
