"""What launching a GPU step costs the host, piece by piece, and how much slower that is after waiting for the device.

``python -m bench.cuda_host [--model random:qwen3-0.6b] [--batches 1,256] [--set engine.K=V]`` prints a table: each
piece within real steps, launched one ahead, where the caches have cooled down while the host waited; and ``hot``,
called over and over. A piece that is far slower within steps suffers from the machine, not from what it does.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from baton.engine.cuda.runner import CudaRunner
from baton.engine.runner import Part
from bench.cuda_runner import opened, sequences

STEPS = 60
WARM_STEPS = 8
HOT_REPEATS = 200
SHOWN = 14  # functions of the profile

Times = defaultdict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cuda_host")
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--batches", default="1,256", help="decode batches")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="engine.KEY=VALUE")
    options = parser.parse_args()
    with opened(options.model, options.settings) as (runner, _):
        for batch in map(int, options.batches.split(",")):
            drive = Steps(runner, batch, options.context)
            print(f"B{batch} x {options.context}")
            report(drive)
            drive.forget()


class Steps:
    """Steady decoding of one batch, launched one ahead. What stands in the blocks does not matter to the time."""

    def __init__(self, runner: CudaRunner, batch: int, context: int) -> None:
        self.runner = runner
        self._parts = sequences(runner, [context] * batch, 4 * (STEPS + WARM_STEPS) + HOT_REPEATS)
        self._at = context
        runner.launch(self.next_parts())
        self.run(WARM_STEPS, runner.launch)

    def next_parts(self) -> list[Part]:
        self._at += 1
        return [
            Part(part.key, part.context, self._at - 2, self._at - 1, part.blocks, part.draw) for part in self._parts
        ]

    def run(self, steps: int, launch: Callable[[list[Part]], None]) -> None:
        """One step stays in flight."""
        for _ in range(steps):
            launch(self.next_parts())
            self.runner.collect()

    def forget(self) -> None:
        self.runner.collect()
        for part in self._parts:
            self.runner.forget(part.key)


def report(steps: Steps) -> None:
    runner = steps.runner
    launches: list[float] = []

    def timed_launch(parts: list[Part]) -> None:
        begun = time.perf_counter()
        runner.launch(parts)
        launches.append(time.perf_counter() - begun)

    before, started = runner.times, time.perf_counter()
    steps.run(STEPS, timed_launch)
    wall, times = time.perf_counter() - started, runner.times
    device, idle = times.device - before.device, times.device_idle - before.device_idle
    print(
        f"  step {wall / STEPS * 1e3:.3f} ms, on the device {device / STEPS * 1e3:.3f}, "
        f"idle between {idle / STEPS * 1e6:.1f} us; launch {statistics.median(launches) * 1e6:.0f} us"
    )
    pieces: Times = defaultdict(list)
    with pieces_timed(runner, pieces):
        steps.run(STEPS, runner.launch)
    hot = hot_times(steps)
    for name, seconds in pieces.items():
        tail = f"  hot {hot[name] * 1e6:7.1f}" if name in hot else ""
        print(f"  {name:24} {statistics.median(seconds) * 1e6:7.1f} us{tail}")
    with cProfile.Profile() as profile:
        steps.run(STEPS, runner.launch)
    pstats.Stats(profile).sort_stats("tottime").print_stats(SHOWN)


@contextmanager
def pieces_timed(runner: CudaRunner, pieces: Times) -> Iterator[None]:
    """Each call of what a launch consists of adds its seconds under its name."""
    m = runner._machinery  # noqa: SLF001
    parts: list[tuple[Any, str]] = [
        (m.buffer, "stage"),
        (m.batch, "pack"),
        (m.sampler, "upload"),
        (m.buffer, "upload"),
        (runner._timer, "start"),  # noqa: SLF001
        (runner._timer, "end"),  # noqa: SLF001
        (runner, "launch"),
        *((step, "replay") for step in m.steps.values()),
        *((slot, "queue") for slot in runner._slots),  # noqa: SLF001
    ]
    patched = [_Patch(owner, name, pieces) for owner, name in parts]
    try:
        yield
    finally:
        for patch in patched:
            patch.undo()


class _Patch:
    """A method of one object that is timed until ``undo``."""

    def __init__(self, owner: Any, name: str, pieces: Times) -> None:
        self._owner, self._name = owner, name
        call, into = getattr(owner, name), pieces[f"{type(owner).__name__}.{name}"]

        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            result = call(*arguments)
            into.append(time.perf_counter() - begun)
            return result

        setattr(owner, name, timed)

    def undo(self) -> None:
        delattr(self._owner, self._name)


def hot_times(steps: Steps) -> dict[str, float]:
    """Median seconds of the pieces that need no device, called without any waiting between."""
    m = steps.runner._machinery  # noqa: SLF001
    packs: list[float] = []
    torch.cuda.synchronize()
    staged = m.buffer.stage()
    for _ in range(HOT_REPEATS):
        parts = steps.next_parts()
        begun = time.perf_counter()
        m.batch.pack(parts, staged)
        packs.append(time.perf_counter() - begun)
    return {"Batch.pack": statistics.median(packs)}


if __name__ == "__main__":
    main()
