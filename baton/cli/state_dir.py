"""What ``baton up`` leaves for the other commands: addresses, pids, logs and the local key; for its owner only."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from baton.core.errors import ConfigError

DEFAULT = Path.home() / ".baton"


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """One child of the launcher. ``service`` is its module's last name, or ``redis`` for the embedded server."""

    service: str
    id: str
    pid: int
    log: str = ""


@dataclass(frozen=True, slots=True)
class StackRecord:
    """A running stack. ``ready`` turns true when the path is warm."""

    supervisor_pid: int
    gateway: str
    key: str
    model: str
    state_url: str
    state_password: str
    processes: tuple[LaunchedProcess, ...] = ()
    ready: bool = False


class StateDir:
    """The directory; files in it have mode 0600, itself 0700."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def record_path(self) -> Path:
        return self.path / "stack.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def prepare(self) -> None:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"state-dir {self.path}: cannot be made: {error.strerror}") from error

    def write(self, record: StackRecord) -> None:
        self.write_private("stack.json", json.dumps(dataclasses.asdict(record), indent=1))

    def write_private(self, name: str, text: str) -> Path:
        """Atomically, mode 0600."""
        handle, temporary = tempfile.mkstemp(dir=self.path, prefix=f".{name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        target = self.path / name
        Path(temporary).replace(target)
        return target

    def find(self) -> StackRecord | None:
        """The stack recorded here if its supervisor lives; a record left by a killed one counts as none."""
        try:
            fields = cast(dict[str, Any], json.loads(self.record_path.read_text(encoding="utf-8")))
            fields["processes"] = tuple(LaunchedProcess(**entry) for entry in fields["processes"])
            record = StackRecord(**fields)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.record_path}: not readable as a stack record: {error}") from error
        return record if is_alive(record.supervisor_pid) else None

    def read(self) -> StackRecord:
        record = self.find()
        if record is None:
            raise ConfigError(f"nothing runs under {self.path}: start it with `baton up --state-dir {self.path}`")
        return record

    def clear(self) -> None:
        self.record_path.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Whether ``pid`` runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
