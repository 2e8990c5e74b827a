"""What commands print: progress on standard error, results on standard output."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_FIGURE = re.compile(r"[\d.,+/-]*")  # 12, 1,475, 0.5, 3+1, 4/8/16, or nothing


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
    """Columns padded to their widest cell. One that holds nothing but figures stands right."""
    lines = [header, *rows]
    columns = range(len(header))
    widths = [max(len(line[column]) for line in lines) for column in columns]
    figures = [bool(rows) and all(_FIGURE.fullmatch(row[column]) for row in rows) for column in columns]

    def drawn(line: Sequence[str]) -> str:
        cells = zip(line, widths, figures, strict=True)
        return "  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in cells).rstrip()

    return "\n".join([drawn(header), "  ".join("-" * width for width in widths), *map(drawn, rows)])
