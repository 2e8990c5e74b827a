"""Named KV blocks as files, one each. A file is whole or it is refused: written aside, renamed, verified when read.

Layout of a file, little-endian: magic "BKV1", bytes of the graph version (u16), bytes of the payload (u64), name (16),
checksum (16), graph version (UTF-8), checksum of all before (8), payload. Nothing is synced: what a power failure
spoils does not verify.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from baton.core.errors import CorruptTransfer
from baton.core.types import TierBlock
from services.kvtransfer.checksum import head_checksum, verify_named

MAGIC = b"BKV1"
_HEAD = struct.Struct("<4sHQ16s16s")
_HEAD_CHECKSUM = 8
_SUFFIX, _ASIDE = ".kv", ".part"


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """What a file's head says. ``size`` is that of the whole file."""

    name: bytes
    size: int
    graph_version: str


def file_bytes(block: TierBlock) -> int:
    """How long the block's file is."""
    return _HEAD.size + len(block.graph_version.encode()) + _HEAD_CHECKSUM + len(block.payload)


class BlockFiles:
    """The files of one directory, which belongs to one process. Blocking: call it from a thread."""

    def __init__(self, directory: Path) -> None:
        """OSError when the directory cannot be made."""
        self._directory = directory
        for one in (directory.parent, directory):  # prompts can be told from KV: nobody else's business
            one.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(self, block: TierBlock) -> None:
        """OSError when the disk is full or broken; then nothing is left of the block."""
        path = self._path(block.name)
        version = block.graph_version.encode()
        head = _HEAD.pack(MAGIC, len(version), len(block.payload), block.name, block.checksum) + version
        aside = path.with_suffix(_ASIDE)
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            with open(aside, "wb", opener=_private) as file:
                file.write(head + head_checksum(head))
                file.write(block.payload)
            aside.replace(path)
        except OSError:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise

    def read(self, name: bytes) -> TierBlock:
        """CorruptTransfer when the file is not, or no longer, what was written; OSError when it cannot be read."""
        with self._path(name).open("rb") as file:
            found, checksum, payload_bytes = _read_head(file, name)
            payload = file.read(payload_bytes + 1)
        if len(payload) != payload_bytes:
            raise CorruptTransfer(
                f"block {name.hex()}: {payload_bytes} bytes were written, its file has another length"
            )
        verify_named(name, payload, checksum, when="as read from disk")
        return TierBlock(name, payload, checksum, found.graph_version)

    def remove(self, names: Iterable[bytes]) -> None:
        for name in names:
            with suppress(OSError):  # it is gone, or it will be found to be nobody's at the next start
                self._path(name).unlink()

    def scan(self) -> tuple[list[StoredBlock], int]:
        """Every block here, the one written first first, and how many files were removed because they are none."""
        found: list[tuple[int, StoredBlock]] = []
        removed = 0
        for path in sorted(self._directory.glob(f"*/*{_ASIDE}")):
            path.unlink(missing_ok=True)  # its writer was killed
        for path in sorted(self._directory.glob(f"*/*{_SUFFIX}")):
            try:
                found.append((path.stat().st_mtime_ns, _examine(path)))
            except (CorruptTransfer, OSError, ValueError):
                removed += 1
                with suppress(OSError):
                    path.unlink()
        return [block for _, block in sorted(found, key=lambda each: each[0])], removed

    def read_pins(self) -> frozenset[bytes]:
        """The names that were pinned last."""
        try:
            return frozenset(bytes.fromhex(line) for line in self._pins.read_text().split())
        except (OSError, ValueError):
            return frozenset()

    def write_pins(self, names: Iterable[bytes]) -> None:
        aside = self._pins.with_suffix(_ASIDE)
        with open(aside, "w", opener=_private, encoding="ascii") as file:
            file.writelines(f"{name.hex()}\n" for name in sorted(names))
        aside.replace(self._pins)

    @property
    def _pins(self) -> Path:
        return self._directory / "pins"

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self._directory / text[:2] / f"{text}{_SUFFIX}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _read_head(file: BinaryIO, name: bytes) -> tuple[StoredBlock, bytes, int]:
    """(the block, its checksum, its payload's length); CorruptTransfer for a head that is not this block's."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise CorruptTransfer(f"block {name.hex()}: its file is cut short")
    magic, version_bytes, payload_bytes, written_as, checksum = _HEAD.unpack(head)
    version = file.read(version_bytes)
    is_sound = magic == MAGIC and head_checksum(head + version) == file.read(_HEAD_CHECKSUM)
    if not is_sound or written_as != name:
        raise CorruptTransfer(f"block {name.hex()}: its file's head is not its own")
    size = _HEAD.size + version_bytes + _HEAD_CHECKSUM + payload_bytes
    return StoredBlock(name, size, version.decode()), checksum, payload_bytes


def _examine(path: Path) -> StoredBlock:
    with path.open("rb") as file:
        block, _, _ = _read_head(file, bytes.fromhex(path.stem))
        if os.fstat(file.fileno()).st_size != block.size:
            raise CorruptTransfer(f"block {path.stem}: its file has another length than was written")
    return block
