"""What the engine itself did while something was measured: its counters, and what they cost the host.

Read from ``EngineStats``. Its times become figures by the step; those of an engine without a device are left out.
"""

from __future__ import annotations

import time
from typing import Protocol

import psutil

from baton.core.clock import Clock
from baton.core.types import EngineStats

ENGINE_MODULE = "baton.engine.process"


class Observed(Protocol):
    """The part of ``EngineApi`` that is looked at."""

    @property
    def stats(self) -> EngineStats: ...


class EngineWatch:
    """Figures of an engine between the watch's last start (its making is one) and ``figures``."""

    def __init__(self, engine: Observed, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._processes = _engine_processes()
        self.start()

    def start(self) -> None:
        self._engine_cpu = _cpu_seconds(self._processes)
        self._own_cpu = time.process_time()
        self._stats = self._engine.stats
        self._started = self._clock.now()

    def figures(self) -> dict[str, float]:
        seconds = self._clock.now() - self._started
        found = step_figures(self._stats, self._engine.stats)
        own_cpu, engine_cpu = time.process_time() - self._own_cpu, _cpu_seconds(self._processes) - self._engine_cpu
        found |= {"seconds": seconds, "client_cpu_share": own_cpu / seconds}
        if found["steps"]:
            found["engine_step_ms"] = 1000 * seconds / found["steps"]
        if self._processes and found["steps"]:
            found["engine_cpu_ms_per_step"] = 1000 * engine_cpu / found["steps"]  # all threads, spinning included
        return found


def step_figures(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Steps and preemptions between two snapshots, and times by the step as far as the engine keeps them."""
    names = ("steps", "preemptions", "host_seconds", "device_seconds", "device_idle_seconds")
    grown = {name: getattr(after, name) - getattr(before, name) for name in names}
    steps = grown["steps"]
    found: dict[str, float] = {"steps": steps, "preemptions": grown["preemptions"]}
    for name in ("host", "device"):
        if steps and grown[f"{name}_seconds"]:
            found[f"{name}_ms_per_step"] = 1000 * grown[f"{name}_seconds"] / steps
    device, idle = grown["device_seconds"], grown["device_idle_seconds"]
    if device + idle > 0:
        found["device_idle_share"] = idle / (device + idle)
    return found


def _engine_processes() -> list[psutil.Process]:
    """Engines that this process has started."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        try:
            if ENGINE_MODULE in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue  # it has ended
    return found


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        times = process.cpu_times()
        total += times.user + times.system
    return total
