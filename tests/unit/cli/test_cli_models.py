from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.cli import models
from baton.cli.models import convert, listing, resolve
from baton.core.errors import ConfigError, ModelError

TINY = Path(__file__).parents[2] / "data" / "tiny" / "llama-gqa-tied"


@pytest.fixture
def converted_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories that files were converted into. The conversion itself is tested with the engine."""
    names: list[str] = []

    def convert_weights(gguf: Path, directory: Path, progress: object) -> None:
        del gguf, progress
        names.append(directory.name)
        directory.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (directory / name).write_bytes((TINY / name).read_bytes())

    def write_tokenizer(gguf: Path, directory: Path) -> None:
        del gguf
        (directory / "tokenizer.json").write_text("{}")

    monkeypatch.setattr("baton.engine.weights.gguf.convert_weights", convert_weights)
    monkeypatch.setattr("baton.text.gguf_tokenizer.write_tokenizer", write_tokenizer)
    return names


def test_a_directory_without_tokenizer_serves_ids_only(tmp_path: Path) -> None:
    resolved = resolve(str(TINY), tmp_path)
    assert (resolved.name, resolved.engine_model, resolved.tokenizer_directory) == ("llama-gqa-tied", str(TINY), None)


def test_a_relative_directory_is_found_by_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TINY.parent)
    assert resolve("llama-gqa-tied", tmp_path).engine_model == str(TINY)


def test_random_weights_are_named_after_their_shape(tmp_path: Path) -> None:
    assert resolve("random:tiny-llama", tmp_path).name == "random-tiny-llama"
    assert resolve("fake", tmp_path).engine_model == "fake"
    with pytest.raises(ModelError, match="random:none: neither"):
        resolve("random:none", tmp_path)


def test_a_gguf_file_is_converted_once(tmp_path: Path, converted_names: list[str]) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    first, second = (resolve(str(gguf), tmp_path / "cache") for _ in range(2))
    assert first == second
    assert first.name == "model"
    assert first.tokenizer_directory == Path(first.engine_model)
    assert len(converted_names) == 1
    assert converted_names[0] in listing(tmp_path / "cache")


def test_another_file_of_the_same_name_is_another_model(tmp_path: Path, converted_names: list[str]) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.gguf").touch()
        resolve(str(tmp_path / folder / "model.gguf"), tmp_path / "cache")
    os.utime(tmp_path / "a" / "model.gguf", (1, 1))
    resolve(str(tmp_path / "a" / "model.gguf"), tmp_path / "cache")
    assert len(set(converted_names)) == 3


def test_a_conversion_without_its_last_file_is_not_complete(tmp_path: Path, converted_names: list[str]) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    directory = convert(gguf, None, tmp_path)
    for file in directory.iterdir():
        if file.name != "model.safetensors":
            file.unlink()
    assert not models.is_complete(directory)


def test_a_conversion_overwrites_no_other_model(tmp_path: Path, converted_names: list[str]) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    convert(gguf, tmp_path / "out")
    with pytest.raises(ConfigError, match="holds a model already"):
        convert(gguf, tmp_path / "out")
    assert len(converted_names) == 1


def test_a_model_that_is_not_here_says_how_to_get_it(tmp_path: Path) -> None:
    assert "smollm2-135m-instruct  (get it: baton model fetch smollm2-135m-instruct)" in listing(tmp_path)
