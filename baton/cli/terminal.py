"""What commands print: progress on standard error, results on standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """``text`` as it may go to a terminal: without the control characters that a model could steer it with."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


class Progress:
    """A line that shows how far a long step is; redrawn on a terminal, printed in fifths elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // total if total else 100
        interactive = sys.stderr.isatty()
        step = percent if interactive else percent // 20 * 20
        if step == self._shown:
            return
        self._shown = step
        end = "\n" if percent >= 100 or not interactive else ""
        start = "\r" if interactive else ""
        print(f"{start}{self._what}: {percent:3d} %", end=end, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; cells that look like numbers stand right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def cell(text: str, width: int) -> str:
        return text.rjust(width) if text[:1].isdigit() else text.ljust(width)

    drawn = ["  ".join(cell(text, width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([drawn[0], "  ".join("-" * width for width in widths), *drawn[1:]])
