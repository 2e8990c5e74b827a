"""Random weights of a shape, with a context as long as a benchmark needs: no weight depends on that length."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from baton.core.errors import ConfigError
from baton.engine.models.hf_config import read_json_object
from baton.engine.weights.source import RANDOM_PREFIX, config_path, load_spec
from bench.shapes import Shape

FAKE = "fake"


@contextmanager
def with_context(model: str, shapes: Sequence[Shape]) -> Iterator[str]:
    """``model``, able to hold the tokens of ``shapes``: a ``random:`` one whose context is too short is given a config
    of its own. ConfigError for a directory whose context is."""
    if model == FAKE:
        yield model
        return
    limit = load_spec(model).context_length
    if not model.startswith(RANDOM_PREFIX):
        for shape in shapes:
            if shape.context > limit:
                raise ConfigError(f"--shapes: {shape.name}: must fit the context of {model}, {limit} tokens")
        yield model
        return
    positions = max(limit, *(shape.roomy_context for shape in shapes))
    values = read_json_object(config_path(model)) | {"max_position_embeddings": positions}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        path = Path(directory) / f"{Path(model.removeprefix(RANDOM_PREFIX)).stem}.json"
        path.write_text(json.dumps(values), encoding="utf-8")
        yield f"{RANDOM_PREFIX}{path}"
