"""Settings of a prefill worker (section ``prefill``); its engine's are in section ``engine``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from services.process.config import ProcessConfig


@dataclass(frozen=True, slots=True)
class PrefillConfig(ProcessConfig):
    SECTION: ClassVar[str] = "prefill"
