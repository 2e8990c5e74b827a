from __future__ import annotations

import asyncio
import os

import pytest

from bench import memory_watch
from bench.memory_watch import LEAST_SAMPLES, MIB, MemoryWatch


def watched(monkeypatch: pytest.MonkeyPatch, *mebibytes: float) -> MemoryWatch:
    values = iter(mebibytes)
    monkeypatch.setattr(memory_watch, "_device_bytes", lambda gpu: next(values) * MIB * (gpu == 1))
    watch = MemoryWatch("cuda", gpu=1)

    async def main() -> None:
        for _ in mebibytes:
            await watch.sample()

    asyncio.run(main())
    return watch


def test_memory_that_grows_is_told_and_a_peak_in_between_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    growing = watched(monkeypatch, *(5000 + 4 * second for second in range(LEAST_SAMPLES)))
    assert growing.faults() == ["device memory grew from 5004 to 5124 MiB"]
    flat = watched(monkeypatch, *(5000 + 900 * (second == 20) for second in range(LEAST_SAMPLES)))
    assert flat.faults() == []
    assert flat.figures()["device"]["peak"] == 5900


def test_what_comes_and_goes_hides_no_growth_and_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = [(0, 900)[second % 2] * (second > LEAST_SAMPLES // 2) for second in range(LEAST_SAMPLES)]
    assert watched(monkeypatch, *(5000 + passing for passing in busy)).faults() == []
    leaking = watched(monkeypatch, *(5000 + 2 * second + passing for second, passing in enumerate(busy)))
    [fault] = leaking.faults()
    assert fault.startswith("device memory grew from 5002 to ")


def test_a_few_samples_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(monkeypatch, 1.0, 5000.0).faults() == []


def test_a_gpu_whose_memory_cannot_be_told_is_a_fault_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    watch = MemoryWatch("cuda")
    asyncio.run(watch.sample())
    [fault] = watch.faults()
    assert fault.startswith("the GPU's memory could not be watched: ")


def test_the_memory_of_this_process_is_counted_and_pages_of_files_apart() -> None:
    before = memory_watch._own(os.getpid())
    kept = bytearray(os.urandom(32 * MIB))
    after = memory_watch._own(os.getpid())
    assert before.anonymous + 30 * MIB < after.anonymous < before.anonymous + 60 * MIB
    assert after.files < before.files + 30 * MIB
    assert len(kept) == 32 * MIB
