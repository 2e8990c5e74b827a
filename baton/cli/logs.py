"""``baton logs``: what the processes wrote, merged or of one service, followed on demand."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from baton.core.errors import InvalidRequest

FOLLOW_SECONDS = 0.2


def log_files(directory: Path, service: str | None) -> list[Path]:
    """The log files of ``service`` (a role such as ``decode`` or a process id), or all."""
    files = sorted(directory.glob("*.log"))
    chosen = [f for f in files if service is None or f.stem == service or f.stem.rpartition("-")[0] == service]
    if not chosen:
        known = ", ".join(file.stem for file in files) or "none"
        raise InvalidRequest(f"logs: no log of {service!r}; there are: {known}", field="service")
    return chosen


def lines(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        prefix = f"{file.stem}: " if len(files) > 1 else ""
        with file.open(encoding="utf-8", errors="replace") as text:
            yield from (prefix + line.rstrip("\n") for line in text)


def follow(files: Sequence[Path]) -> Iterator[str]:
    """New lines as they come, for ever."""
    opened: list[tuple[str, TextIO]] = [(file.stem, file.open(encoding="utf-8", errors="replace")) for file in files]
    try:
        for _, text in opened:
            text.seek(0, 2)
        while True:
            fresh = [f"{name}: {line.rstrip()}" for name, text in opened for line in text]
            yield from fresh
            if not fresh:
                time.sleep(FOLLOW_SECONDS)
    finally:
        for _, text in opened:
            text.close()
