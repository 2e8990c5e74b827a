"""Commands below a command line, and the types of their options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

Run = Callable[[argparse.Namespace, Sequence[str]], int]


class Commands:
    """The choices that follow ``parser``. Options are never abbreviated: a misspelt one is an error."""

    def __init__(self, parser: argparse.ArgumentParser, metavar: str = "COMMAND") -> None:
        self._choices = parser.add_subparsers(required=True, metavar=metavar)

    def add(self, name: str, help: str, run: Run | None = None) -> argparse.ArgumentParser:
        """``run`` gets the parsed arguments and the words they were parsed from; it returns the exit status."""
        parser = self._choices.add_parser(name, help=help, description=help, allow_abbrev=False)
        if run is not None:
            parser.set_defaults(run=run)
        return parser


def integer(low: int, high: int) -> Callable[[str], int]:
    """A type for options that take a whole number from ``low`` to ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be an integer from {low} to {high}, got {text!r}")
        return value

    return parse


def named(given: str) -> str:
    """A type for options that name something. An empty one is most likely a variable that is not set, and what stands
    in for an option that is not given may be worth more: the local key may do everything.
    """
    if not given.strip():
        raise argparse.ArgumentTypeError(f"must not be empty, got {given!r}")
    return given


def directory(given: str) -> Path:
    """A type for options that name a directory: an empty one would be the current one."""
    return Path(named(given))


def text(given: str) -> str:
    """A type for options that take text: bytes that are no UTF-8 cannot be sent."""
    try:
        given.encode("utf-8")
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"must be UTF-8, got {given!r:.80}") from error
    return given
