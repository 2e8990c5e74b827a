"""What a result was measured on and with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("baton", "torch", "triton", "flashinfer-python", "numpy", "grpcio", "nccl4py")
GPU_FIELDS = ("name", "driver_version", "memory.total", "clocks.max.sm", "power.limit")
QUERY_SECONDS = 20


def hardware() -> dict[str, object]:
    """CPU and GPUs. Of a GPU: name, driver, memory, highest clock and power limit, as its driver tells them."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    found: dict[str, object] = {"cpu": cpu, "cores": os.cpu_count(), "machine": platform.machine()}
    found["python"] = platform.python_version()
    return found | ({"gpus": gpus} if (gpus := _gpus()) else {})


def versions() -> dict[str, str]:
    """Of those packages that are installed, and of this source tree where git knows it."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    commit = _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12")
    return found | ({"commit": commit} if commit else {})


def _gpus() -> list[dict[str, str]]:
    listed = _output("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader")
    rows = [[value.strip() for value in line.split(",")] for line in listed.splitlines()]
    return [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(GPU_FIELDS)]


def _output(*command: str) -> str:
    """Standard output of a program; empty where it is absent or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
