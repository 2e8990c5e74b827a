"""The ``baton`` command."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import NoReturn

from baton.cli import bench, models, quota_commands, request_commands, stack_commands, tenant_commands
from baton.cli.subcommands import Commands
from baton.cli.terminal import say
from baton.core.errors import BatonError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Errors are one line on standard error, status 2."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser().parse_args(given)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)  # so that whatever a command has started ends with it
    try:
        status = arguments.run(arguments, given)
        sys.stdout.flush()
        return status
    except BatonError as error:
        say(f"baton: {error.message}")
        return 2
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        say(f"baton: what it prints cannot be written: {error.strerror}")
        _drop_output()
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _drop_output() -> None:
    """What is still buffered fits nowhere, and would be tried again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise SystemExit(128 + signum)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton", description="Serve large language models from split pools.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"baton {version('baton')}")
    commands = Commands(parser)
    stack_commands.add(commands)
    request_commands.add(commands)
    tenant_commands.add_commands(commands)
    quota_commands.add_commands(commands)
    _add_model(commands)
    bench.add(commands)
    return parser


def _add_model(commands: Commands) -> None:
    actions = Commands(commands.add("model", "fetch, convert, warm and list models"), "ACTION")
    fetch = actions.add("fetch", "download a known model and convert it", _fetch)
    fetch.add_argument("name", help=f"one of {', '.join(models.KNOWN_NAMES)}")
    convert = actions.add("convert", "turn a .gguf file into a model directory", _convert)
    convert.add_argument("path", type=Path)
    convert.add_argument("--output", type=Path, help="directory to write; below the cache without it")
    warm = actions.add("warm", "compile the GPU kernels for a model and choose its products, ahead of `up`", _warm)
    warm.add_argument("--model", default=models.DEFAULT_MODEL, help="name, directory, .gguf file or random:CONFIG")
    warm.add_argument("--device", choices=("cuda",), default="cuda", help="where the engines will compute")
    warm.add_argument("--config", type=Path, help="TOML file with one table per section")
    warm.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")
    actions.add("list", "known models and whether they are here", _list)


def _fetch(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    print(models.fetched(arguments.name))
    return 0


def _convert(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    print(models.convert(arguments.path, arguments.output))
    return 0


def _warm(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from baton.cli import kernel_cache  # late: all services' settings

    flags = [f"engine.device={arguments.device}", *arguments.set]
    print(kernel_cache.fill(models.resolve(arguments.model), arguments.config, flags))
    return 0


def _list(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    del arguments
    print(models.listing())
    return 0


if __name__ == "__main__":
    sys.exit(main())
