"""What a model name or path stands for: its spec and the identity of its weights. No torch.

A model is a Hugging Face directory or ``random:CONFIG``, where CONFIG is a preset's name or the path of a config.json.
``baton.engine.weights.load`` reads the weights themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import cast

from baton.core.errors import ModelError
from baton.engine.models.hf_config import HfConfig, read_json_object
from baton.engine.models.registry import read_spec
from baton.engine.spec import DecoderSpec
from baton.engine.weights.staging import staged_file

RANDOM_PREFIX = "random:"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_HASH_FILE = ".baton-weights-hash.json"
_PRESETS = Path(__file__).with_name("presets")
_CHUNK = 32 << 20
_WORTH_CACHING = 64 << 20


def load_spec(model: str | Path) -> DecoderSpec:
    """The spec of a model directory or of ``random:CONFIG``. Raises ModelError naming file, field and value."""
    return read_spec(HfConfig.read(config_path(str(model))))


def preset_names() -> list[str]:
    """The names that ``random:`` takes besides a path."""
    return sorted(path.stem for path in _PRESETS.glob("*.json"))


def weights_hash(model: str | Path, seed: int = 0, weight_format: str = "auto") -> str:
    """128 bits, in hex, that two workers must share before one may use the other's KV.

    Covers every byte of the weight files, what the config says about the computation, and the ``weight_format`` that
    they are rounded to when they are loaded. A large directory's hash is kept in a file inside it, if that can be
    written, while names, sizes and times stay the same.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(_spec_identity(load_spec(model)))
    if str(model).startswith(RANDOM_PREFIX):
        digest.update(b"random" + seed.to_bytes(8, "little", signed=True))
    else:
        digest.update(_content_hash(Path(model)).encode())
    if weight_format != "auto":
        digest.update(weight_format.encode())
    return digest.hexdigest()


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


def config_path(model: str) -> Path:
    """The config.json of a model directory or of ``random:CONFIG``. Raises ModelError when there is none."""
    if not model.startswith(RANDOM_PREFIX):
        if not Path(model).is_dir():
            raise ModelError(f"{model}: no such model directory")
        return Path(model) / "config.json"
    name = model.removeprefix(RANDOM_PREFIX)
    if name in preset_names():
        return _PRESETS / f"{name}.json"
    if not Path(name).is_file():
        raise ModelError(f"{model}: neither a config.json nor a preset; presets: {', '.join(preset_names())}")
    return Path(name)


def _spec_identity(spec: DecoderSpec) -> bytes:
    """The fields that change what the model computes. Unset ones are left out, so a new one keeps old hashes."""
    fields = {name: value for name, value in asdict(spec).items() if value}
    for ends_only in ("eos_token_ids", "bos_token_id", "context_length"):
        fields.pop(ends_only, None)
    return json.dumps(fields, sort_keys=True).encode()


def _content_hash(directory: Path) -> str:
    states = [(file, file.stat()) for file in checkpoint_files(directory)]
    if sum(state.st_size for _, state in states) < _WORTH_CACHING:
        return _hash_files(states)
    key = [[file.name, state.st_size, state.st_mtime_ns] for file, state in states]
    cache = directory / _HASH_FILE
    with suppress(ModelError):  # absent, or damaged: hash again
        cached = read_json_object(cache)
        if cached.get("files") == key:
            return str(cached.get("hash"))
    result = _hash_files(states)
    with suppress(OSError), staged_file(cache) as staging:  # a read-only directory is hashed each time
        staging.write_text(json.dumps({"files": key, "hash": result}))
    return result


def _hash_files(states: list[tuple[Path, os.stat_result]]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with ThreadPoolExecutor(os.cpu_count()) as executor:  # hashlib releases the interpreter lock
        for piece in executor.map(_hash_piece, *zip(*_pieces(states), strict=True)):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(states: list[tuple[Path, os.stat_result]]) -> Iterator[tuple[Path, int]]:
    for file, state in states:
        for start in range(0, max(1, state.st_size), _CHUNK):
            yield file, start


def _hash_piece(file: Path, start: int) -> bytes:
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            return hashlib.blake2b(stream.read(_CHUNK), person=b"baton piece", digest_size=32).digest()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map: must be an object that maps tensors to files, got {weight_map!r}")
    for tensor, name in cast("dict[str, object]", weight_map).items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index}: weight_map: {tensor}: must be a file name in this directory, got {name!r}")
    return cast("dict[str, str]", weight_map)
