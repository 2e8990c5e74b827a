"""The ``baton`` command as a user runs it: in processes of its own, over a state directory of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.cli.state_dir import StackRecord, StateDir, is_alive
from baton.cli.status import family

GENEROUS_SECONDS = 120.0
COMMAND = (sys.executable, "-m", "baton.cli.main")


@dataclass(frozen=True)
class Baton:
    """``baton COMMAND --state-dir PATH ...``"""

    path: Path

    def words(self, command: str, *rest: str) -> list[str]:
        return [*COMMAND, command, "--state-dir", str(self.path), *rest]

    def run(self, command: str, *rest: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(command, *rest), capture_output=True, text=True, timeout=GENEROUS_SECONDS, check=False
        )

    def run_action(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command that has commands of its own, ``baton tenant list``, which takes its options after these."""
        return subprocess.run(
            [*COMMAND, *words, "--state-dir", str(self.path)],
            capture_output=True,
            text=True,
            timeout=GENEROUS_SECONDS,
            check=False,
        )

    def start(self, command: str, *rest: str) -> subprocess.Popen[str]:
        return subprocess.Popen(self.words(command, *rest), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def record(self) -> StackRecord:
        return StateDir(self.path).read()

    def log(self, process_id: str) -> str:
        return (self.path / "logs" / f"{process_id}.log").read_text(encoding="utf-8")

    def status(self) -> dict[str, dict[str, Any]]:
        """``baton status --json``, by process id."""
        shown = self.run("status", "--json")
        assert shown.returncode == 0, shown.stderr
        return {entry["id"]: entry for entry in json.loads(shown.stdout)["processes"]}

    def generate(self, *rest: str) -> dict[str, Any]:
        """The answer line of ``baton generate --json``."""
        shown = self.run("generate", "--json", *rest)
        assert shown.returncode == 0, shown.stderr
        return json.loads(shown.stdout)

    def pids(self) -> list[int]:
        """Every process of the stack: the supervisor, its children, and theirs."""
        return family(self.record().supervisor_pid)


def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + GENEROUS_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.02)


def all_dead(pids: list[int]) -> bool:
    return not any(map(is_alive, pids))


@contextmanager
def stack(path: Path, *rest: str, model: str = "fake") -> Iterator[Baton]:
    """``baton up --detach`` on a free port, and whatever is left of it killed at the end."""
    baton = Baton(path)
    shown = baton.run("up", "--model", model, "--detach", "--set", "gateway.port=0", *rest)
    assert shown.returncode == 0, shown.stderr
    pids = baton.pids()
    try:
        yield baton
    finally:
        baton.run("down")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
