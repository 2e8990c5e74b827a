"""Settings of the planner (section ``planner``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from services.process.config import ProcessConfig


@dataclass(frozen=True, slots=True)
class PlannerConfig(ProcessConfig):
    SECTION: ClassVar[str] = "planner"

    local_prefill_max_tokens: int = 128  # uncached tokens that decode computes itself; 0: none, always remote
    speculation: bool = True  # false: no request has drafts, whatever the engines are set to
    max_candidates: int = 4  # of each kind in one plan
    refresh_seconds: float = 0.2  # between two looks at the registry
    in_flight_seconds: float = 1.0  # a decision counts as load until the workers' own figures show it
    tie_noise: float = 0.01  # of a worker's capacity: loads that are closer than this are equal
    retry_after_seconds: float = 1.0  # told to callers when no worker is ready
    # Longer prompts are computed with this attention window, where workers have the module. It changes answers; 0: off.
    attention_window: int = 0

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        for key, least in (
            ("local_prefill_max_tokens", 0),
            ("max_candidates", 1),
            ("tie_noise", 0.0),
            ("attention_window", 0),
        ):
            self.require(getattr(self, key) >= least, key, f"must be at least {least}")
        self.require(self.refresh_seconds > 0, "refresh_seconds", "must be positive")
