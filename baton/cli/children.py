"""The processes of a local stack: started on loopback, tied to the launcher's life, stopped in order.

All in one session, so that none waits behind the others longer than its share (``baton.state.embedded`` says more).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from baton.cli.models import ResolvedModel
from baton.cli.placement import VISIBLE
from baton.cli.state_dir import StateDir
from baton.cli.terminal import say
from baton.core.config import environment_settings, file_settings
from baton.core.types import Role

STOP_SECONDS = 10.0
# On a few shared cores a healthy planner or Redis may wait for its turn longer than a server's budgets allow.
LOCAL_DEFAULTS = ("gateway.planner_budget_ms=200", "state.timeout_ms=250")
REDIS_ID = "redis-0"


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What to start. ``flags`` are the user's SECTION.KEY=VALUE settings; they win over the launcher's defaults."""

    model: ResolvedModel
    prefill: int = 1
    decode: int = 1
    kvtransfer: int = 1
    device: str = "cpu"
    gpus: tuple[str, ...] = ()  # that workers are placed on, one after another; empty: all
    config: Path | None = None
    flags: tuple[str, ...] = ()
    start_timeout: float = 300.0

    def services(self) -> list[tuple[Role, str]]:
        """(role, process id) in the order of starting: workers first, for they load longest."""
        counts = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.KVTRANSFER: self.kvtransfer}
        counts |= {Role.PLANNER: 1, Role.GATEWAY: 1}
        return [(role, f"{role.value}-{index}") for role, count in counts.items() for index in range(count)]


@dataclass(frozen=True, slots=True)
class Child:
    role: Role
    id: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def started(
    plan: StackPlan,
    state_dir: StateDir,
    settings: Sequence[str],
    keys_file: Path,
    secrets: Mapping[str, str],
    gpus: Mapping[str, str],
) -> Iterator[list[Child]]:
    """All service processes; ``secrets`` go into their environment, and what they see of GPUs. Stopped in reverse
    order, whatever happens."""
    children: list[Child] = []
    given = [*_local_defaults(plan.config, state_dir), *settings]
    try:
        for role, process_id in plan.services():
            with state_dir.new_log(process_id) as output:
                seen = {VISIBLE: gpus[process_id]} if process_id in gpus else {}
                process = subprocess.Popen(
                    _command(plan, role, process_id, given, keys_file),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | secrets | seen | {"GOMP_SPINCOUNT": "0"},
                    process_group=0,  # Ctrl-C reaches the launcher alone, which then drains in order
                )
            children.append(Child(role, process_id, process, Path(output.name)))
        yield children
    finally:
        _stop(children)


def _command(plan: StackPlan, role: Role, process_id: str, settings: Sequence[str], keys_file: Path) -> list[str]:
    package = "gateway" if role is Role.GATEWAY else f"services.{role.value}"
    given = [*settings, f"engine.device={plan.device}"]
    given += [f"engine.model={plan.model.engine_model}", f"engine.served_name={plan.model.name}"]
    if role is Role.GATEWAY:
        given += [f"gateway.keys_file={keys_file}"]
        if plan.model.tokenizer_directory is not None:
            given += [f"gateway.tokenizers={plan.model.name}={plan.model.tokenizer_directory}"]
    command = [sys.executable, "-m", package, "--id", process_id, "--parent-pid", str(os.getpid())]
    command += ["--config", str(plan.config)] if plan.config else []
    return command + [part for setting in [*given, *plan.flags] for part in ("--set", setting)]


def _local_defaults(config: Path | None, state_dir: StateDir) -> list[str]:
    """The launcher's own defaults, but for keys that the user's file or environment sets."""
    layers = [*(file_settings(config) if config else ()), *environment_settings(os.environ)]
    taken = {f"{setting.section}.{setting.key}" for setting in layers}
    directories = (
        f"kvtransfer.tier_directory={state_dir.tier}",
        f"gateway.delivery_log_directory={state_dir.deliveries}",
    )
    defaults = (*LOCAL_DEFAULTS, *directories)
    return [flag for flag in defaults if flag.partition("=")[0] not in taken]


def _stop(children: Sequence[Child]) -> None:
    """SIGTERM first, SIGKILL for what stays. The gateway first, so that its streams drain while workers still work."""
    for child in reversed(children):
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGTERM)
    for child in reversed(children):
        try:
            child.process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"{child.id} did not stop within {STOP_SECONDS:.0f} s; killed")
            child.process.kill()
            child.process.wait()


def reason_of_end(log: Path) -> str:
    """Why a process ended, most likely: the message of its last error, else the last line that it printed."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]
    for line in reversed(lines):
        entry = _log_entry(line)
        if entry.get("level") in ("error", "critical"):
            return _with_exception(entry)
    if not lines:
        return "it printed nothing"
    return str(_log_entry(lines[-1]).get("message", lines[-1]))


def _with_exception(entry: Mapping[str, object]) -> str:
    """A bug's message says little; the last line of its traceback says what happened."""
    raised = str(entry.get("exception", "")).strip().splitlines()
    return f"{entry.get('message')}: {raised[-1]}" if raised else str(entry.get("message"))


def _log_entry(line: str) -> Mapping[str, object]:
    """The fields of a structured log line; none for other output, such as an interpreter's traceback."""
    try:
        parsed: Any = json.loads(line)
    except ValueError:
        return {}
    return cast(Mapping[str, object], parsed) if isinstance(parsed, dict) else {}
