"""What is staged appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.weights.staging import staged, staged_file


def test_a_directory_appears_when_the_block_ends(tmp_path: Path) -> None:
    with staged(tmp_path / "deep" / "model") as staging:
        (staging / "a").write_text("1")
        assert not (tmp_path / "deep" / "model").exists()
    assert (tmp_path / "deep" / "model" / "a").read_text() == "1"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model"]


def test_nothing_stays_of_a_block_that_raises(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staged(tmp_path / "model") as staging:
        (staging / "a").write_text("1")
        raise RuntimeError
    with pytest.raises(RuntimeError), staged_file(tmp_path / "file") as staging:
        staging.write_text("1")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_faster_of_two_writers_stands(tmp_path: Path) -> None:
    with staged(tmp_path / "model") as slow:
        (slow / "a").write_text("slow")
        with staged(tmp_path / "model") as fast:
            (fast / "a").write_text("fast")
    assert (tmp_path / "model" / "a").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with staged_file(tmp_path / "file") as staging:
        staging.write_text("new")
        assert (tmp_path / "file").read_text() == "old"
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
