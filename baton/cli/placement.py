"""Which GPUs each worker of a local stack sees. No worker picks its own: its GPU is the first one that it sees.

The others follow, since a worker can map another one's pool only where it sees that one's GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import takewhile

from baton.core.errors import ConfigError
from baton.core.types import Role

VISIBLE = "CUDA_VISIBLE_DEVICES"
LAST = "-1"  # CUDA sees none of those that come after it
LISTING_SECONDS = 20.0
_LISTED = re.compile(r"GPU (\d+): ")
_NAME = re.compile(r"0|[1-9][0-9]*|GPU-[0-9a-fA-F-]+")


def visible_gpus(
    workers: Sequence[tuple[Role, str]], all_gpus: Sequence[str], of_role: Mapping[Role, Sequence[str]]
) -> dict[str, str]:
    """The value of CUDA_VISIBLE_DEVICES by worker id. Workers take the GPUs of their role in turn, those of roles
    without any all GPUs in turn, in the order of ``workers``. Nothing for workers whose GPUs nobody knows.

    GPUs are named as CUDA does it: by index, or by UUID.
    """
    turns: dict[Role | None, int] = {}
    own: dict[str, str] = {}
    for role, worker_id in workers:
        named = of_role.get(role) or ()
        gpus, queue = (named, role) if named else (all_gpus, None)
        if gpus:
            turn = turns[queue] = turns.get(queue, -1) + 1
            own[worker_id] = gpus[turn % len(gpus)]
    used = tuple(dict.fromkeys(own.values()))
    return {worker: ",".join((gpu, *(each for each in used if each != gpu))) for worker, gpu in own.items()}


def known_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Those that this process sees: by its own environment, else by what the driver lists; empty if neither says."""
    given = environ.get(VISIBLE)
    if given is not None:
        names = (name.strip() for name in given.split(","))
        return tuple(name for name in takewhile(lambda name: name != LAST, names) if name)
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=LISTING_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(_LISTED.findall(listed.stdout)) if listed.returncode == 0 else ()


def checked_gpus(option: str, names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """ConfigError, naming ``option``, for a name that is none, comes twice, or is not among ``known`` (if any are)."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{option}: a GPU is named by its index or UUID, got {name!r}")
        if known and name not in known:
            raise ConfigError(f"{option}: there is no GPU {name} here, only {', '.join(known)}")
        if list(names).count(name) > 1:
            raise ConfigError(f"{option}: names GPU {name} twice")
    return tuple(names)
