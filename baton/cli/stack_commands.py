"""``baton up``, ``down``, ``status`` and ``logs``: the stack on this machine.

What a command alone needs it imports late, so that the others start without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from baton.cli import logs, models, state_dir
from baton.cli.state_dir import StateDir
from baton.cli.subcommands import Commands, Run, directory, integer
from baton.core.errors import ConfigError

MAX_PROCESSES = 64  # of one role; more is a typing error on one machine


def add(commands: Commands) -> None:
    _add_up(commands)
    _add(commands, "down", "stop what `up` started", _down)
    parser = _add(commands, "status", "show every process", _status)
    parser.add_argument("--json", action="store_true", help="one object with a list of processes")
    parser = _add(commands, "logs", "show what processes wrote", _logs)
    parser.add_argument("service", nargs="?", help="a role or a process id; all without it")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what they write from now on")


def _add(commands: Commands, name: str, help: str, run: Run) -> argparse.ArgumentParser:
    parser = commands.add(name, help, run)
    parser.add_argument(
        "--state-dir", type=directory, default=state_dir.DEFAULT, help="where the stack keeps its record"
    )
    return parser


def _add_up(commands: Commands) -> None:
    parser = _add(commands, "up", "start every service on this machine", _up)
    parser.add_argument(
        "--model", default=models.DEFAULT_MODEL, help="name, directory, .gguf file, random:CONFIG, fake"
    )
    count = integer(0, MAX_PROCESSES)
    parser.add_argument("--prefill", type=count, default=1, metavar="N", help="prefill workers")
    parser.add_argument("--decode", type=count, default=1, metavar="N", help="decode workers")
    parser.add_argument("--kvtransfer", type=count, default=1, metavar="N", help="processes of the cache tier")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the engines compute")
    parser.add_argument(
        "--gpus", metavar="N,N", help="GPUs that workers are placed on in turn, by index or UUID; all without it"
    )
    parser.add_argument("--config", type=Path, help="TOML file with one table per section")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")
    parser.add_argument("--detach", action="store_true", help="return when ready, leave a supervisor behind")


def _up(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    from baton.cli import up
    from baton.cli.launcher import StackPlan

    where = StateDir(arguments.state_dir)
    if arguments.decode + arguments.prefill < 1:
        raise ConfigError("up: at least one worker is needed, got --prefill 0 --decode 0")
    if arguments.gpus is not None and arguments.device != "cuda":
        raise ConfigError(f"--gpus: goes with --device cuda, got --device {arguments.device}")
    up.check_own_settings(arguments.config, arguments.set, model=arguments.model, device=arguments.device)
    up.check_settings(arguments.config, [f"engine.device={arguments.device}", *arguments.set])
    if arguments.detach:
        return up.detach([word for word in given if word != "--detach"], where)
    plan = StackPlan(
        model=models.resolve(arguments.model),
        prefill=arguments.prefill,
        decode=arguments.decode,
        kvtransfer=arguments.kvtransfer,
        device=arguments.device,
        # An empty name is refused with the wrong ones: who wrote "0,$OTHER" is told that it is not set.
        gpus=() if arguments.gpus is None else tuple(name.strip() for name in arguments.gpus.split(",")),
        config=arguments.config,
        flags=tuple(arguments.set),
    )
    return asyncio.run(up.run(plan, where))


def _down(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from baton.cli import up

    return up.down(StateDir(arguments.state_dir))


def _status(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from baton.cli import status

    record = StateDir(arguments.state_dir).read()
    processes = asyncio.run(status.entries(record))
    print(json.dumps({"processes": processes}) if arguments.json else status.as_table(processes))
    return 0


def _logs(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    files = logs.log_files(StateDir(arguments.state_dir).logs, arguments.service)
    for line in logs.follow(files) if arguments.follow else logs.lines(files):
        print(line, flush=arguments.follow)
    return 0
