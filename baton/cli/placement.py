"""Which GPUs each worker of a local stack sees. No worker picks its own: its GPU is the first one that it sees.

The others follow, since a worker can map another one's pool only where it sees that one's GPU. Not so with parts of a
GPU (MIG devices): CUDA shows a process one of them, and maps nothing from one to another.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from baton.core.errors import ConfigError
from baton.core.types import Role

VISIBLE = "CUDA_VISIBLE_DEVICES"
LAST = "-1"  # CUDA sees none of those that come after it
LISTING_SECONDS = 20.0
_UUID = r"[0-9a-fA-F-]+"
_LISTED = re.compile(rf"GPU (?P<index>\d+): .*\(UUID: (?P<gpu>GPU-{_UUID})\)|\s+MIG .*\(UUID: (?P<part>MIG-{_UUID})\)")
_NAME = re.compile(rf"0|[1-9][0-9]*|GPU-{_UUID}|MIG-{_UUID}|MIG-GPU-{_UUID}/[0-9]+/[0-9]+")


@dataclass(frozen=True, slots=True)
class Gpu:
    """``name`` is what CUDA_VISIBLE_DEVICES may hold; ``uuid`` empty: nobody said it."""

    name: str
    uuid: str = ""

    def is_called(self, name: str) -> bool:
        """By its name, or by its UUID or the beginning of that, as CUDA takes it."""
        return name == self.name or (_is_uuid(name) and (self.uuid or self.name).startswith(name))


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
    whole = tuple(dict.fromkeys(gpu for gpu in own.values() if not _is_part(gpu)))
    return {
        worker: gpu if _is_part(gpu) else ",".join((gpu, *(each for each in whole if each != gpu)))
        for worker, gpu in own.items()
    }


def known_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those that this process sees: by its own environment, else by what the driver lists; empty if neither says.

    ConfigError when the environment names what is no GPU, or hides them all.
    """
    given = environ.get(VISIBLE)
    if given is None:
        return _listed_gpus()
    names = tuple(takewhile(lambda name: name != LAST, (name.strip() for name in given.split(","))))
    if not names or names == ("",):
        raise ConfigError(f"{VISIBLE}: hides every GPU, got {given!r}; unset it, or take --device cpu")
    return tuple(Gpu(name) for name in checked_gpus(VISIBLE, names, ()))


def _listed_gpus() -> tuple[Gpu, ...]:
    """A GPU that is split is listed by its parts: nothing else of it can be used."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=LISTING_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if listed.returncode != 0:
        return ()
    whole: list[Gpu] = []
    parts: dict[Gpu, list[Gpu]] = {}
    for line in filter(None, map(_LISTED.match, listed.stdout.splitlines())):
        if line["gpu"]:
            whole.append(Gpu(line["index"], line["gpu"]))
        elif whole:
            parts.setdefault(whole[-1], []).append(Gpu(line["part"]))
    return tuple(each for gpu in whole for each in parts.get(gpu, [gpu]))


def checked_gpus(option: str, names: Sequence[str], known: Sequence[Gpu]) -> tuple[str, ...]:
    """As ``known`` names them. ConfigError, naming ``option``, for a name that is none, comes twice, is that of no GPU
    among ``known`` (if any are), or of several."""
    found: list[str] = []
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{option}: a GPU is named by its index or UUID, got {name!r}")
        called = [gpu.name for gpu in known if gpu.is_called(name)] if known else [name]
        if len(called) != 1:
            number = "there is no GPU" if not called else "there is more than one GPU"
            raise ConfigError(f"{option}: {number} {name} here, only {', '.join(gpu.name for gpu in known)}")
        if called[0] in found:
            raise ConfigError(f"{option}: names GPU {name} twice")
        found += called
    return tuple(found)


def _is_uuid(name: str) -> bool:
    return name.startswith(("GPU-", "MIG-"))


def _is_part(name: str) -> bool:
    return name.startswith("MIG-")
