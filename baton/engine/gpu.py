"""The energy that a GPU has used, as it counts it itself (NVML). No torch here.

Source: ``nvmlDeviceGetTotalEnergyConsumption``, NVML API reference: millijoules since the driver was loaded, of the
whole GPU. What several workers on one GPU use cannot be told apart, and a MIG slice has no count of its own.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Protocol

from baton.core.clock import Clock

log = logging.getLogger(__name__)
BETWEEN_LOOKS_SECONDS = 0.25  # a look costs tens of microseconds, and the count changes ten times a second or less


class EnergyMeter(Protocol):
    def joules(self) -> float:
        """Used since this was made, by everybody; never less than before. 0 where nothing measures it."""
        ...


class NoEnergy:
    """Nothing measures it here."""

    def joules(self) -> float:
        return 0.0


class GpuEnergy:
    """One GPU's count, looked at seldom. A GPU that stops to answer stands still."""

    def __init__(self, nvml: Any, handle: Any, clock: Clock) -> None:
        """``nvml`` is the module ``pynvml``, initialised. Raises its NVMLError where the GPU does not count."""
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self._first: int = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        self._looked_at = clock.now()
        self._joules = 0.0

    def joules(self) -> float:
        if self._clock.now() - self._looked_at >= BETWEEN_LOOKS_SECONDS:
            self._looked_at = self._clock.now()
            self._look()
        return self._joules

    def _look(self) -> None:
        try:
            millijoules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._nvml.NVMLError as error:
            log.debug("the GPU does not tell its energy", extra={"error": str(error)})
            return
        self._joules = max(self._joules, (millijoules - self._first) / 1000)


def gpu_energy(uuid: str, clock: Clock) -> EnergyMeter:
    """Of the GPU of this UUID (as torch writes it, without ``GPU-``). Without NVML, or where the GPU keeps no count, it
    is not measured, which is logged."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        log.info("energy is not measured: nvidia-ml-py is not installed")
        return NoEnergy()
    return measured(nvml, uuid, clock)


def measured(nvml: Any, uuid: str, clock: Clock) -> EnergyMeter:
    """The same with the module given."""
    try:
        nvml.nvmlInit()
        return GpuEnergy(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}"), clock)
    except nvml.NVMLError as error:
        log.info("energy is not measured", extra={"error": str(error)})
        return NoEnergy()
