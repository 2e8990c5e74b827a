"""Ledgers in files, where they are kept for good: JSON lines, a folder an organisation and a file a month.

    DIRECTORY/ORGANISATION/2026-01.jsonl     entries written in January (UTC), in the order of their ids

Any number of processes may append to one directory: each takes the organisation's lock, looks which entry is the last,
and adds only what follows it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from baton.core.errors import ConfigError, StateUnavailable
from baton.core.tenancy import check_name
from baton.core.types import LedgerEntry, LedgerReason, ledger_position

LONGEST_LINE = 64 * 1024  # bytes, with room to spare: its parts are bounded
_ENDING = ".jsonl"
_PROBE = ".probe"  # no organisation: names begin with a letter or digit

T = TypeVar("T")


class LedgerFiles:
    """Implements ``LedgerArchive``; what it appends is on disk before it returns.

    A line that a crash cut off is nobody's entry: readers pass over it, and the next one to append takes it away.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def opened(cls, directory: Path) -> LedgerFiles:
        """Those in ``directory``, which is made. ConfigError when nothing can be written there."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / _PROBE).touch()
            (directory / _PROBE).unlink(missing_ok=True)  # another one may have taken it away
        except OSError as error:
            raise ConfigError(f"ledger directory {directory}: cannot be written to: {error.strerror}") from error
        return cls(directory)

    async def organisations(self) -> Sequence[str]:
        return await _in_thread(partial(_organisations, self._directory))

    async def latest(self, organisation: str) -> str:
        return await _in_thread(partial(_latest, self._folder(organisation)))

    async def append(self, organisation: str, entries: Sequence[LedgerEntry]) -> None:
        await _in_thread(partial(_append, self._folder(organisation), entries))

    async def entries(self, organisation: str, after: str = "", limit: int = 1000) -> Sequence[LedgerEntry]:
        return await _in_thread(partial(_read, self._folder(organisation), ledger_position(after), limit))

    def _folder(self, organisation: str) -> Path:
        check_name("organization", organisation)
        return self._directory / organisation


async def _in_thread(work: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(work)
    except (OSError, ValueError) as error:
        raise StateUnavailable(f"ledger files: {error}") from error


def _organisations(directory: Path) -> list[str]:
    return sorted({path.parent.name for path in directory.glob(f"*/*{_ENDING}")})


def _append(folder: Path, entries: Sequence[LedgerEntry]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        for path in _months(folder)[-1:]:
            _take_cut_line(path)
        last = ledger_position(_latest(folder))
        fresh = (entry for entry in entries if ledger_position(entry.id) > last)
        for month, written in groupby(fresh, key=lambda entry: _month(ledger_position(entry.id))):
            _add_lines(folder / month, written)
        _sync(folder)
    _sync(folder.parent)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _add_lines(path: Path, entries: Iterator[LedgerEntry]) -> None:
    lines = "".join(json.dumps(asdict(entry), separators=(",", ":")) + "\n" for entry in entries)
    with path.open("ab") as file:
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """A new file's name is on disk only with its folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_cut_line(path: Path) -> None:
    cut = len(_tail(path).rpartition(b"\n")[2])
    if cut:
        os.truncate(path, path.stat().st_size - cut)


def _latest(folder: Path) -> str:
    for path in reversed(_months(folder)):
        whole = _tail(path).rpartition(b"\n")[0]
        if whole:
            return _entry(whole.rpartition(b"\n")[2], path).id
    return ""


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2 * LONGEST_LINE))
        return file.read()


def _read(folder: Path, after: tuple[int, int], limit: int) -> list[LedgerEntry]:
    found: list[LedgerEntry] = []
    for path in _months(folder):
        if path.name < _month(after):
            continue
        with path.open("rb") as file:
            file.seek(_offset_behind(file, path, after))
            whole = (line for line in file if line.endswith(b"\n"))
            found += [_entry(line, path) for line in islice(whole, limit - len(found))]
        if len(found) == limit:
            break
    return found


def _offset_behind(file: BinaryIO, path: Path, after: tuple[int, int]) -> int:
    """Where the first line with a later id begins, by bisection: those before ``low`` are not later, from ``high`` on
    all are."""
    low, high = 0, path.stat().st_size
    while low < high:
        middle = (low + high) // 2
        file.seek(max(0, middle - 1))
        if middle:
            file.readline()  # to the first line that begins at the middle or behind it
        line = file.readline() if file.tell() < high else b""
        if not line.endswith(b"\n") or ledger_position(_entry(line, path).id) > after:
            high = middle
        else:
            low = file.tell()
    return low


def _months(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{_ENDING}"))


def _month(position: tuple[int, int]) -> str:
    moment = datetime.fromtimestamp(max(0, position[0]) / 1000, UTC)
    return f"{moment:%Y-%m}{_ENDING}"


def _entry(line: bytes, path: Path) -> LedgerEntry:
    try:
        fields = cast("dict[str, Any]", json.loads(line))
        fields["reason"] = LedgerReason(fields["reason"])
        entry = LedgerEntry(**fields)
        ledger_position(entry.id)
        return entry
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {line[:100]!r} is no entry of a ledger: {error}") from error
