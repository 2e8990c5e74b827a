"""What ``--model`` may be, and how it becomes a directory that the services load."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from baton.cli.terminal import Progress, say
from baton.core.errors import ConfigError
from baton.engine.weights.fetch import DEFAULT_MODEL, KNOWN_MODELS, default_cache_dir, fetch, known_model
from baton.engine.weights.source import RANDOM_PREFIX, checkpoint_files, load_spec

__all__ = ["DEFAULT_MODEL", "ResolvedModel", "convert", "fetched", "listing", "resolve"]

CACHE = default_cache_dir()
KNOWN_NAMES = tuple(model.name for model in KNOWN_MODELS)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """``engine_model`` is what engines load; ``tokenizer_directory`` None: the model serves token ids only."""

    name: str
    engine_model: str
    tokenizer_directory: Path | None


def resolve(model: str, cache: Path = CACHE) -> ResolvedModel:
    """A known name, a Hugging Face directory, a .gguf file, ``random:CONFIG`` or ``fake``.

    Raises ConfigError when it is none of these, ModelError when the model is incomplete or unsupported.
    """
    if model == "fake":
        return ResolvedModel("fake", "fake", None)
    if model.startswith(RANDOM_PREFIX):
        load_spec(model)
        return ResolvedModel(f"random-{Path(model.removeprefix(RANDOM_PREFIX)).stem}", model, None)
    if model in KNOWN_NAMES:
        return _served(model, fetched(model, cache))
    path = Path(model).expanduser()
    if model.strip() and path.is_dir():  # an empty name would be the current directory
        return _served(path.absolute().name, path.absolute())
    if path.suffix == ".gguf" and path.is_file():
        return _served(path.stem, converted(path.absolute(), _cached(path.absolute(), cache)))
    known = ", ".join(KNOWN_NAMES)
    raise ConfigError(
        f"model: {model!r} is neither a known name ({known}), a directory, a .gguf file nor random:CONFIG"
    )


def fetched(name: str, cache: Path = CACHE) -> Path:
    """The directory of a known model, downloaded and converted when it is not there yet. Raises UnknownModel."""
    known_model(name)
    directory = cache / name
    if is_complete(directory):
        return directory
    say(f"{name}: downloading")
    return converted(fetch(name, cache, Progress(f"{name}: download")), directory)


def converted(gguf: Path, directory: Path) -> Path:
    """A GGUF file as a Hugging Face directory; done once."""
    if is_complete(directory):
        return directory
    from baton.engine.weights.gguf import convert_weights  # late: numpy, which nothing else here needs
    from baton.text.gguf_tokenizer import write_tokenizer

    convert_weights(gguf, directory, Progress(f"{directory.name}: convert"))
    write_tokenizer(gguf, directory)
    return directory


def _cached(gguf: Path, cache: Path) -> Path:
    """Where a file's conversion is kept: another file of the same name, or a later version, has its own."""
    state = gguf.stat()
    identity = f"{gguf}:{state.st_size}:{state.st_mtime_ns}".encode()
    return cache / f"{gguf.stem}-{hashlib.blake2b(identity, digest_size=4).hexdigest()}"


def is_complete(directory: Path) -> bool:
    """Weights come first and the tokenizer last, each written whole, so the last file tells."""
    return (directory / "tokenizer.json").is_file() and (directory / "model.safetensors").is_file()


def _served(name: str, directory: Path) -> ResolvedModel:
    """Tells a directory that no engine can load before any is started, as far as that costs nothing."""
    load_spec(directory)
    checkpoint_files(directory)
    has_tokenizer = (directory / "tokenizer.json").is_file()
    return ResolvedModel(name, str(directory), directory if has_tokenizer else None)


def convert(gguf: Path, directory: Path | None, cache: Path = CACHE) -> Path:
    """The directory that ``gguf`` was converted into. ConfigError when ``directory`` holds a model already."""
    if not gguf.is_file():
        raise ConfigError(f"model convert: {gguf}: no such file")
    if directory is not None and is_complete(directory):
        raise ConfigError(f"model convert: --output {directory}: holds a model already; remove it or name another")
    return converted(gguf.absolute(), directory or _cached(gguf.absolute(), cache))


def listing(cache: Path = CACHE) -> str:
    """A line a model: its name, and where it is or how to get it."""
    names = sorted({*KNOWN_NAMES, *(entry.name for entry in cache.glob("*") if is_complete(entry))})
    here = {name: cache / name for name in names if is_complete(cache / name)}
    return "\n".join(f"{name}  {here.get(name, f'(get it: baton model fetch {name})')}" for name in names)
