"""Ties a process to its parent's death, so that nothing is orphaned when a parent is SIGKILLed (Linux).

As a command, ``python -m baton.core.tether PARENT_PID PROGRAM ARG...`` ties itself and becomes the program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL this process when the parent's *thread* that started it ends; exit if the parent is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def tethered(command: list[str]) -> list[str]:
    """``command`` as a command line that dies with the calling process."""
    return [sys.executable, "-m", "baton.core.tether", str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
