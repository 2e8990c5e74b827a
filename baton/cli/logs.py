"""``baton logs``: what the processes wrote, in the order of time, all or those of one service; followed on demand."""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import TextIO

from baton.core.errors import InvalidRequest

FOLLOW_SECONDS = 0.2
TAIL_BYTES = 4096
_TIME = re.compile(r'\{"time": "([0-9TZ:.-]+)"')


def log_files(directory: Path, service: str | None) -> list[Path]:
    """The log files of ``service`` (a role such as ``decode`` or a process id), or all."""
    files = sorted(directory.glob("*.log"))
    if not files:
        raise InvalidRequest(f"logs: there are none under {directory}", field="service")
    chosen = [f for f in files if service is None or f.stem == service or f.stem.rpartition("-")[0] == service]
    if not chosen:
        known = ", ".join(file.stem for file in files)
        raise InvalidRequest(f"logs: no log of {service!r}; there are: {known}", field="service")
    return chosen


def lines(files: Sequence[Path]) -> Iterator[str]:
    """By time. A line that tells none, of a traceback, say, follows the one that it was written after."""
    for _, line in merge(*(_timed(file, _prefix(file, files)) for file in files), key=itemgetter(0)):
        yield line


def _timed(file: Path, prefix: str) -> Iterator[tuple[str, str]]:
    at = ""
    with _open(file) as text:
        for line in text:
            told = _TIME.match(line)
            at = told[1] if told else at
            yield at, prefix + line.rstrip("\n")


def follow(files: Sequence[Path]) -> Generator[str, None, None]:
    """The last lines and then new ones as they come, for ever."""
    with ExitStack() as stack:
        followed = [_Followed(stack.enter_context(_open(file)), _prefix(file, files)) for file in files]
        while True:
            fresh = [line for one in followed for line in one.fresh()]
            yield from fresh
            if not fresh:
                time.sleep(FOLLOW_SECONDS)


class _Followed:
    """One file, from its last lines on."""

    def __init__(self, text: TextIO, prefix: str) -> None:
        self._text = text
        self._prefix = prefix
        self._begun = ""  # a line that its writer has not ended yet
        start = max(0, text.seek(0, 2) - TAIL_BYTES)
        text.seek(start)
        if start:
            text.readline()  # most likely not a whole one

    def fresh(self) -> Iterator[str]:
        while piece := self._text.readline():
            self._begun += piece
            if self._begun.endswith("\n"):
                yield self._prefix + self._begun.rstrip("\n")
                self._begun = ""


def _prefix(file: Path, files: Sequence[Path]) -> str:
    return f"{file.stem}: " if len(files) > 1 else ""


def _open(file: Path) -> TextIO:
    return file.open(encoding="utf-8", errors="replace", newline="\n")
