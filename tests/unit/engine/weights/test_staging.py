"""What is staged appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.weights.staging import staged_file


def test_nothing_stays_of_a_block_that_raises(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staged_file(tmp_path / "file") as staging:
        staging.write_text("1")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with staged_file(tmp_path / "file") as staging:
        staging.write_text("new")
        assert (tmp_path / "file").read_text() == "old"
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
