"""What ``baton up`` leaves for the other commands: addresses, pids, logs and the local key; for its owner only."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from baton.core.errors import ConfigError
from baton.core.types import Role

DEFAULT = Path.home() / ".baton"
PRIVATE = 0o600
OWN_SECONDS = 1.0  # others hold the lock for an instant when they look
_OF_A_PROCESS = re.compile(rf"({'|'.join(['redis', *Role])})-\d+\.log")


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """One child of the launcher. ``service`` is its module's last name, or ``redis`` for the embedded server.

    Addresses and epoch are known once the stack is ready.
    """

    service: str
    id: str
    pid: int
    log: str = ""
    address: str = ""
    http_address: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class StackRecord:
    """A running stack. ``ready`` turns true when the path is warm.

    ``gateway_ca`` is a PEM file where the gateway's door has TLS.
    """

    supervisor_pid: int
    gateway: str
    key: str
    model: str
    state_url: str
    state_password: str
    state_namespace: str
    processes: tuple[LaunchedProcess, ...] = ()
    gateway_ca: str = ""
    ready: bool = False


class StateDir:
    """The directory that ``--state-dir`` names. All files in it have mode 0600.

    A supervisor holds a lock on it for as long as it lives: the kernel frees the lock of a killed one, so a record that
    it left behind counts for nothing, whoever has its pid by then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def record_path(self) -> Path:
        return self.path / "stack.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def tier(self) -> Path:
        """Where the cache tier keeps its blocks, from one stack to the next."""
        return self.path / "tier"

    @property
    def deliveries(self) -> Path:
        """Where gateways keep what their streams were delivered, for those that come after one that was killed."""
        return self.path / "deliveries"

    def prepare(self) -> None:
        """Make the directories; one that exists keeps its mode."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.logs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"state-dir {self.path}: cannot be made: {error.strerror}") from error

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Be the one supervisor of this directory. ConfigError when there is another."""
        with self._open_lock("a+") as lock:
            deadline = time.monotonic() + OWN_SECONDS
            while not _locked(lock, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise ConfigError(f"state-dir {self.path}: a stack runs here already (pid {self.supervisor()})")
                time.sleep(0.01)
            with self._usable():
                self._claim(lock)
            try:
                yield
            finally:
                with self._usable():
                    self.record_path.unlink(missing_ok=True)

    def _claim(self, lock: IO[str]) -> None:
        """Write who we are, unbuffered, so that a full disk is told here; drop the logs of earlier stacks."""
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), str(os.getpid()).encode())
        for stale in self.logs.glob("*.log"):
            if _OF_A_PROCESS.fullmatch(stale.name):
                stale.unlink()

    def supervisor(self) -> int | None:
        """The pid of the supervisor; None when none lives."""
        try:
            lock = self._open_lock("r")
        except ConfigError:
            return None
        with lock:
            pid = lock.read()
            return None if _locked(lock, fcntl.LOCK_SH) or not pid.isdigit() else int(pid)

    def _open_lock(self, mode: str) -> IO[str]:
        with self._usable():
            return open(self.path / "lock", mode, opener=_private, encoding="ascii")

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """A disk that is full or read-only, or files of another user, are ConfigError."""
        try:
            yield
        except OSError as error:
            raise ConfigError(f"state-dir {self.path}: cannot be used: {error.strerror}") from error

    def write(self, record: StackRecord) -> None:
        self.write_private("stack.json", json.dumps(dataclasses.asdict(record), indent=1))

    def write_private(self, name: str, text: str) -> Path:
        """Atomically, mode 0600."""
        target = self.path / name
        with self._usable():
            handle, temporary = tempfile.mkstemp(dir=self.path, prefix=f".{name}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                Path(temporary).replace(target)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        return target

    def new_log(self, process_id: str) -> IO[bytes]:
        """An empty log file of mode 0600, open for writing."""
        path = self.logs / f"{process_id}.log"
        with self._usable():
            path.unlink(missing_ok=True)
            return open(path, "wb", opener=_private)

    def find(self) -> StackRecord | None:
        """The stack recorded here, if its supervisor lives."""
        if self.supervisor() is None:
            return None
        try:
            fields = cast(dict[str, Any], json.loads(self.record_path.read_text(encoding="utf-8")))
            fields["processes"] = tuple(LaunchedProcess(**entry) for entry in fields["processes"])
            return StackRecord(**fields)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.record_path}: not readable as a stack record: {error}") from error

    def read(self) -> StackRecord:
        record = self.find()
        if record is None:
            raise ConfigError(f"nothing runs under {self.path}: start it with `baton up --state-dir {self.path}`")
        return record


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE)


def _locked(file: IO[str], kind: int) -> bool:
    """Take the lock, which lasts until ``file`` is closed; False when another has it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_alive(pid: int) -> bool:
    """Whether ``pid`` runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
