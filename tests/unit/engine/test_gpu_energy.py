"""A GPU's own count of its energy, by a double of NVML."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.clock import ManualClock
from baton.engine.gpu import BETWEEN_LOOKS_SECONDS, NoEnergy, gpu_energy, measured


class Nvml:
    """``pynvml`` with one GPU. ``broken``: calls of these names fail."""

    class NVMLError(Exception):
        pass

    def __init__(self, *broken: str) -> None:
        self.broken = set(broken)
        self.millijoules = 5_000_000
        self.looks = 0

    def _call(self, name: str) -> None:
        if name in self.broken:
            raise self.NVMLError("not supported")

    def nvmlInit(self) -> None:
        self._call("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._call("handle")
        assert uuid == "GPU-12-34"
        return "the GPU"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        assert handle == "the GPU"
        self._call("energy")
        self.looks += 1
        return self.millijoules


@pytest.mark.parametrize("uuid", ["12-34", "GPU-12-34"])
def test_joules_count_from_the_engines_start(uuid: str) -> None:
    nvml, clock = Nvml(), ManualClock()
    meter = measured(nvml, uuid, clock)
    nvml.millijoules += 1_500
    clock.advance(BETWEEN_LOOKS_SECONDS)
    assert meter.joules() == 1.5


def test_a_step_that_follows_at_once_does_not_look_again() -> None:
    nvml, clock = Nvml(), ManualClock()
    meter = measured(nvml, "12-34", clock)
    clock.advance(BETWEEN_LOOKS_SECONDS)
    for _ in range(100):
        meter.joules()
    assert nvml.looks == 2  # when it was made, and once since


def test_a_count_that_stops_or_falls_back_is_never_less_than_before() -> None:
    nvml, clock = Nvml(), ManualClock()
    meter = measured(nvml, "12-34", clock)
    for millijoules, broken, expected in ((5_002_000, (), 2.0), (0, (), 2.0), (5_009_000, ("energy",), 2.0)):
        nvml.millijoules, nvml.broken = millijoules, set(broken)
        clock.advance(BETWEEN_LOOKS_SECONDS)
        assert meter.joules() == expected


@pytest.mark.parametrize("broken", ["init", "handle", "energy"])
def test_where_the_gpu_keeps_no_count_nothing_is_measured(broken: str) -> None:
    assert isinstance(measured(Nvml(broken), "12-34", ManualClock()), NoEnergy)


def test_without_nvml_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    meter = gpu_energy("12-34", ManualClock())
    assert meter.joules() == 0.0
