"""A block's file is what was written, or it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.errors import CorruptTransfer
from services.kvtransfer.block_files import BlockFiles, StoredBlock, file_bytes
from tests.tier_blocks import block, name_of

BLOCK = block(7, 100, "graph-3")


def written(directory: Path) -> tuple[BlockFiles, Path]:
    files = BlockFiles(directory)
    files.write(BLOCK)
    (path,) = directory.glob("*/*.kv")
    return files, path


def test_a_block_comes_back_whole_to_another_process(tmp_path: Path) -> None:
    written(tmp_path)
    files = BlockFiles(tmp_path)
    assert files.read(BLOCK.name) == BLOCK
    assert files.scan() == ([StoredBlock(BLOCK.name, file_bytes(BLOCK), "graph-3")], 0)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    files, path = written(tmp_path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        spoiled = bytearray(whole)
        spoiled[position] ^= 1 << position % 8
        path.write_bytes(spoiled)
        with pytest.raises(CorruptTransfer):
            files.read(BLOCK.name)
    path.write_bytes(whole)
    assert files.read(BLOCK.name) == BLOCK


@pytest.mark.parametrize("length", [0, 1, 45, 46, 50, 60, 160])
def test_a_file_cut_short_is_refused_and_dropped_at_the_next_start(tmp_path: Path, length: int) -> None:
    files, path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptTransfer):
        files.read(BLOCK.name)
    assert files.scan() == ([], 1)
    assert not path.exists()


def test_a_file_with_more_than_was_written_is_refused(tmp_path: Path) -> None:
    files, path = written(tmp_path)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CorruptTransfer):
        files.read(BLOCK.name)


def test_a_block_under_anothers_name_is_refused(tmp_path: Path) -> None:
    files, path = written(tmp_path)
    other = path.with_name(f"{name_of(8).hex()}.kv")
    path.rename(other)
    with pytest.raises(CorruptTransfer):
        files.read(name_of(8))
    assert files.scan() == ([], 1)


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    files, path = written(tmp_path)
    aside = path.with_suffix(".part")
    aside.write_bytes(b"half")
    assert len(files.scan()[0]) == 1
    assert not aside.exists()


def test_pins_are_kept(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path)
    assert files.read_pins() == frozenset()
    files.write_pins({name_of(1), name_of(2)})
    assert BlockFiles(tmp_path).read_pins() == {name_of(1), name_of(2)}
    (tmp_path / "pins").write_text("no hexadecimal")
    assert files.read_pins() == frozenset()


def test_nobody_else_can_read_a_prompts_blocks(tmp_path: Path) -> None:
    root = tmp_path / "tier" / "kvtransfer-0"
    files = BlockFiles(root)
    files.write(BLOCK)
    files.write_pins([BLOCK.name])
    made = [root.parent, *root.parent.rglob("*")]
    assert len(made) == 5
    assert [path for path in made if path.stat().st_mode & 0o077] == []
