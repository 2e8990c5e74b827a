"""The ledger, copied to where it is kept for good: entries after the last one that is there, in order.

Redis keeps a ledger until it is trimmed, so a copy that stops anywhere goes on from there: nothing is lost, or twice.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from baton.core.tenancy import check_name
from baton.core.tenancy_api import LedgerApi, LedgerSink
from baton.core.types import LedgerEntry, LedgerReason

PAGE = 1000
LONGEST_LINE = 64 * 1024  # with room to spare: its parts are bounded


async def copy_ledger(ledger: LedgerApi, sink: LedgerSink, organisation: str) -> int:
    """Copy what the sink lacks; how many entries that was. ``trim`` through the sink's latest id is then safe."""
    copied, after = 0, await sink.latest(organisation)
    while page := await ledger.entries(organisation, after, PAGE):
        await sink.append(organisation, page)
        copied, after = copied + len(page), page[-1].id
    return copied


class LedgerFiles:
    """Implements ``LedgerSink``: a file of JSON lines for each organisation, on disk before ``append`` returns.

    One process writes at a time. A line that a crash cut off is taken away and comes again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def latest(self, organisation: str) -> str:
        return await asyncio.to_thread(self._latest, self._path(organisation))

    async def append(self, organisation: str, entries: Sequence[LedgerEntry]) -> None:
        await asyncio.to_thread(self._append, self._path(organisation), entries)

    def read(self, organisation: str) -> list[LedgerEntry]:
        """All entries; raises ValueError naming the line that is none."""
        path = self._path(organisation)
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [_entry(line, f"{path.name}:{number}") for number, line in enumerate(lines, start=1)]

    def _path(self, organisation: str) -> Path:
        check_name("organisation", organisation)
        return self._folder / f"{organisation}.jsonl"

    def _latest(self, path: Path) -> str:
        if not path.exists():
            return ""
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - LONGEST_LINE))
            data = file.read()
        whole, newline, cut = data.rpartition(b"\n")
        if cut:
            os.truncate(path, size - len(cut))
        return _entry(whole.rpartition(b"\n")[2], path.name).id if newline else ""

    def _append(self, path: Path, entries: Sequence[LedgerEntry]) -> None:
        lines = "".join(json.dumps(asdict(entry), separators=(",", ":")) + "\n" for entry in entries)
        with path.open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())


def _entry(line: bytes, where: str) -> LedgerEntry:
    try:
        fields = cast("dict[str, Any]", json.loads(line))
        fields["reason"] = LedgerReason(fields["reason"])
        return LedgerEntry(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: not an entry of a ledger: {error}") from error
