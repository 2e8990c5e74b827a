"""Settings of the planner (section ``planner``)."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    http_port: int = 0
    local_prefill_max_tokens: int = 128  # uncached tokens that decode computes itself; 0: none, always remote
    max_candidates: int = 4  # of each kind in one plan
    refresh_seconds: float = 0.2  # between two looks at the registry
    in_flight_seconds: float = 1.0  # a decision counts as load until the workers' own figures show it
    tie_noise: float = 0.01  # of a worker's capacity: loads that are closer than this are equal
    retry_after_seconds: float = 1.0  # told to callers when no worker is ready

    def __post_init__(self) -> None:
        for key, least in (("local_prefill_max_tokens", 0), ("max_candidates", 1), ("tie_noise", 0.0)):
            if getattr(self, key) < least:
                raise ConfigError(f"planner.{key} must be at least {least}, got {getattr(self, key)}")
        if self.refresh_seconds <= 0:
            raise ConfigError(f"planner.refresh_seconds must be positive, got {self.refresh_seconds}")
