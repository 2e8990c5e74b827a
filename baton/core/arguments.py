"""The command line that every service shares: --id, --config FILE, --set SECTION.KEY=VALUE, --print-config.

A ``__main__`` calls ``parse`` with the sections it reads and gets them filled; with ``--print-config`` the process
prints them, secrets masked, and ends.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.core.config import Section, Settings, describe
from baton.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arguments:
    """``parent_pid`` is set when a launcher started this process and it should die with the launcher."""

    id: str
    settings: Settings
    parent_pid: int | None


def parse(service: str, sections: Sequence[Section[Any]], argv: Sequence[str] | None = None) -> Arguments:
    """Read the command line of ``service``. Ends the process with status 2 and one line on a bad key or value."""
    parser = argparse.ArgumentParser(prog=f"python -m {service}", allow_abbrev=False)
    parser.add_argument("--id", default=f"{service.rpartition('.')[2]}-0", help="name of this process in the fleet")
    parser.add_argument("--config", type=Path, help="TOML file with one table per section")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")
    parser.add_argument("--print-config", action="store_true", help="show the resulting configuration and exit")
    parser.add_argument("--parent-pid", type=int, help="die with this process")
    given = parser.parse_args(argv)
    try:
        settings = Settings.read(file=given.config, environ=os.environ, flags=given.set)
        shown = [describe(section.name, settings.fill(section)) for section in sections]
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: {error.message}\n")
    if given.print_config:
        sys.stdout.write("\n".join(shown))
        sys.exit(0)
    return Arguments(id=given.id, settings=settings, parent_pid=given.parent_pid)
