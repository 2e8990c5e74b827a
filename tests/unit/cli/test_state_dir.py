from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli.state_dir import LaunchedProcess, StackRecord, StateDir
from baton.core.errors import ConfigError

RECORD = StackRecord(
    supervisor_pid=os.getpid(),
    gateway="127.0.0.1:1",
    key="local.secret",
    model="fake",
    state_url="redis://127.0.0.1:2/0",
    state_password="hush",
    state_namespace="baton",
    processes=(LaunchedProcess("decode", "decode-0", 4, "log", "a:1", "a:2", 9),),
    ready=True,
)


def prepared(path: Path) -> StateDir:
    state_dir = StateDir(path / "state")
    state_dir.prepare()
    return state_dir


def test_a_record_is_found_while_its_supervisor_lives_and_not_after(tmp_path: Path) -> None:
    state_dir = prepared(tmp_path)
    with state_dir.owned():
        assert state_dir.find() is None
        state_dir.write(RECORD)
        assert state_dir.find() == state_dir.read() == RECORD
        assert state_dir.supervisor() == os.getpid()
    assert state_dir.find() is None
    assert state_dir.supervisor() is None
    with pytest.raises(ConfigError, match="nothing runs under"):
        state_dir.read()


def test_a_second_supervisor_is_refused(tmp_path: Path) -> None:
    state_dir = prepared(tmp_path)
    with (
        state_dir.owned(),
        pytest.raises(ConfigError, match=f"a stack runs here already \\(pid {os.getpid()}\\)"),
        StateDir(state_dir.path).owned(),
    ):
        pass
    with state_dir.owned():  # the refused one has broken nothing
        pass


def test_what_a_killed_supervisor_left_counts_for_nothing(tmp_path: Path) -> None:
    state_dir = prepared(tmp_path)
    code = (
        "import os, signal, sys; from pathlib import Path; from baton.cli.state_dir import StateDir\n"
        "with StateDir(Path(sys.argv[1])).owned(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(state_dir.path)], check=False, timeout=60)
    state_dir.write(RECORD)  # its pid is ours: a pid that somebody else has by now must not be taken for it
    assert (state_dir.path / "lock").read_text().isdigit()
    assert state_dir.find() is None
    assert state_dir.supervisor() is None
    with state_dir.owned():
        pass


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    state_dir = prepared(tmp_path)
    with state_dir.owned(), state_dir.new_log("decode-0"):
        state_dir.write(RECORD)
        modes = {path.name: path.stat().st_mode & 0o777 for path in state_dir.path.rglob("*") if path.is_file()}
    assert modes == {"lock": 0o600, "stack.json": 0o600, "decode-0.log": 0o600}
    assert state_dir.path.stat().st_mode & 0o777 == 0o700


def test_a_directory_of_somebody_else_keeps_its_mode_and_its_files(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "logs").mkdir()
    for name in ("decode-7.log", "other-1.log", "notes.txt"):
        (tmp_path / "logs" / name).touch()
    state_dir = StateDir(tmp_path)
    state_dir.prepare()
    with state_dir.owned():
        left = sorted(path.name for path in state_dir.logs.iterdir())
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert left == ["notes.txt", "other-1.log"]  # logs of an earlier stack would pass for this one's


def test_a_path_that_cannot_be_a_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made: File exists"):
        StateDir(tmp_path / "file").prepare()


FULL_DISK = """
import resource, sys
from pathlib import Path
from baton.cli.state_dir import StateDir
from baton.core.errors import ConfigError

state_dir = StateDir(Path(sys.argv[1]))
state_dir.prepare()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file may hold a byte


def claim():
    with state_dir.owned():
        pass


for use in (claim, lambda: state_dir.write_private("stack.json", "text")):
    try:
        use()
    except ConfigError as error:
        print(error.message)
"""


def test_a_full_disk_is_told_in_one_line_and_leaves_no_half_written_file(tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = [sys.executable, "-c", FULL_DISK, str(state)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    told = ran.stdout.splitlines()
    assert len(told) == 2 and all(line.startswith(f"state-dir {state}: cannot be used: ") for line in told)
    assert {entry.name for entry in state.iterdir()} == {"lock", "logs"}
