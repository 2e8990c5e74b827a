"""Whether memory stays flat under load: what this process and its engine have for themselves, and what a GPU has.

Pages of files (code that is first run, kernels that are first loaded) are resident, too, and told of, but the system
can take them back: they are no leak. Nor is what is on its way, which may be large (KV between two engines has the
size of its blocks) but goes: of each quarter of the samples the floor counts, which a leak raises as it does the rest.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.engine_watch import ENGINE_MODULE

MIB = 1 << 20
# Growth of the floor from the first quarter of the samples to the last that counts as flat.
FLAT_BYTES = {"client": 64 * MIB, "engine": 64 * MIB, "device": 16 * MIB}
FLAT_SHARE = {"client": 0.03, "engine": 0.03, "device": 0.0}
LEAST_SAMPLES = 40  # fewer say nothing
FLOOR_SHARE = 0.1  # of a quarter's samples that may lie below its floor: the load has only begun, say
SMI_SECONDS = 20

_SIZES = re.compile(r"^(VmRSS|RssAnon):\s+(\d+) kB", re.MULTILINE)


class MemoryWatch:
    """Samples of bytes, by what they are of."""

    def __init__(self, device: str, gpu: int = 0) -> None:
        """``device`` as the engine's: on cuda memory of the GPU counts too, all processes' together.

        ``gpu`` is the driver's number of it, whatever this process is shown.
        """
        self._gpu = gpu
        self._unwatched = ""  # why the GPU's memory could not be told
        names = ("client", "engine", "files", *(("device",) if device == "cuda" else ()))
        self._samples: dict[str, list[float]] = {name: [] for name in names}

    async def sample(self) -> None:
        client, engine = _own(os.getpid()), _engine()
        self._samples["client"].append(client.anonymous)
        self._samples["engine"].append(engine.anonymous)
        self._samples["files"].append(client.files + engine.files)
        if "device" in self._samples and not self._unwatched:
            try:
                self._samples["device"].append(await asyncio.to_thread(_device_bytes, self._gpu))
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._unwatched = f"the GPU's memory could not be watched: {error}"

    def figures(self) -> dict[str, dict[str, float]]:
        """In MiB: the floor of each quarter of the samples, and the peak."""
        return {
            name: {f"quarter_{n + 1}": round(value, 1) for n, value in enumerate(_quarters(samples))}
            | {"peak": round(max(samples) / MIB, 1), "samples": len(samples)}
            for name, samples in self._samples.items()
            if samples
        }

    def faults(self) -> list[str]:
        """What has grown, or was not seen."""
        unseen = [self._unwatched] if self._unwatched else []
        return unseen + [
            fault
            for name, samples in self._samples.items()
            if name in FLAT_BYTES and len(samples) >= LEAST_SAMPLES
            for fault in _growth(name, samples)
        ]


def _growth(name: str, samples: Sequence[float]) -> list[str]:
    first, *_, last = _quarters(samples)
    limit = max(FLAT_BYTES[name] / MIB, FLAT_SHARE[name] * first)
    return [f"{name} memory grew from {first:.0f} to {last:.0f} MiB"] if last - first > limit else []


def _quarters(samples: Sequence[float]) -> list[float]:
    size = max(1, len(samples) // 4)
    starts = [min(len(samples) - size, quarter * len(samples) // 4) for quarter in range(4)]
    return [_floor(samples[start : start + size]) / MIB for start in starts]


def _floor(samples: Sequence[float]) -> float:
    return sorted(samples)[int(FLOOR_SHARE * len(samples))]


class _Resident(NamedTuple):
    """Bytes in memory: a process's own, and those of files."""

    anonymous: float = 0.0
    files: float = 0.0


def _own(pid: int) -> _Resident:
    found = dict(_SIZES.findall(Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")))
    anonymous = 1024.0 * int(found.get("RssAnon", found.get("VmRSS", 0)))
    return _Resident(anonymous, 1024.0 * int(found.get("VmRSS", 0)) - anonymous)


def _engine() -> _Resident:
    """Of other children nothing counts: one that has just been forked still looks as large as this process."""
    total = _Resident()
    for process in psutil.Process().children():
        try:
            if ENGINE_MODULE in process.cmdline():
                own = _own(process.pid)
                total = _Resident(total.anonymous + own.anonymous, total.files + own.files)
        except (psutil.Error, OSError):
            continue  # it has just ended
    return total


def _device_bytes(gpu: int) -> float:
    """In use on a GPU, as its driver tells."""
    command = ("nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    return float(done.stdout.strip()) * MIB
