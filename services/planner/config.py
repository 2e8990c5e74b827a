"""Settings of the planner (section ``planner``)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

from baton.core.errors import ConfigError
from baton.core.pools import Pools, parse_pools
from baton.core.types import CacheClass, CachePolicy, ProcessRecord, Tier
from services.process.config import ProcessConfig

CACHE_ENTRY = re.compile(rf"(-?\d+)=({'|'.join(CacheClass)})(?::(\d{{1,9}}))?")
CACHE_ENTRIES = f"must hold entries PRIORITY=CLASS or PRIORITY=CLASS:KEEP_TOKENS, CLASS one of {', '.join(CacheClass)}"

POOL_ENTRIES = f"must hold entries tenant:NAME=LABEL, tier:TIER=LABEL or LABEL, TIER one of {', '.join(Tier)}"


@dataclass(frozen=True, slots=True)
class PlannerConfig(ProcessConfig):
    """``cache_classes`` are entries ``PRIORITY=CLASS`` or ``PRIORITY=CLASS:KEEP_TOKENS``, with so many leading tokens
    of class keep. The entry of the highest priority which a request's own reaches counts; without one it is ``normal``.
    """

    SECTION: ClassVar[str] = "planner"

    local_prefill_max_tokens: int = 128  # uncached tokens that decode computes itself; 0: none, always remote
    # Unless prompts are always remote, the pools help each other out: a prompt that would wait longer for a prefill
    # worker is computed by its decode worker if that is sooner, and prefill workers give short answers while all decode
    # workers have too much to do: requests that wait, or steps above a limit.
    balance: bool = True
    prefill_wait_ms: float = 200.0
    short_answer_tokens: int = 64  # 0: prefill workers give none
    tpot_limit_ms: float = 0.0  # 0: none
    speculation: bool = True  # false: no request has drafts, whatever the engines are set to
    max_candidates: int = 4  # of each kind in one plan
    refresh_seconds: float = 0.2  # between two looks at the registry
    in_flight_seconds: float = 1.0  # a decision counts as load until the workers' own figures show it
    tie_noise: float = 0.01  # of a worker's capacity: loads that are closer than this are equal
    retry_after_seconds: float = 1.0  # told to callers when no worker is ready
    # Longer prompts are computed with this attention window, where workers have the module. It changes answers; 0: off.
    attention_window: int = 0
    max_tokens: int = 0  # output tokens of an answer, whatever the request asks for; 0: off
    max_chunk_tokens: int = 0  # of a prompt, that one step computes; 0: off
    max_seconds: float = 0.0  # of an answer, from its first plan to its end; 0: off
    cache_classes: tuple[str, ...] = ()
    # tenant:NAME=LABEL or tier:TIER=LABEL: their requests go to workers with the label, and nobody else's do; LABEL
    # alone: those of tenants whose records name it.
    pools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        for key, least in (
            ("local_prefill_max_tokens", 0),
            ("prefill_wait_ms", 0.0),
            ("short_answer_tokens", 0),
            ("tpot_limit_ms", 0.0),
            ("max_candidates", 1),
            ("tie_noise", 0.0),
            ("attention_window", 0),
            ("max_tokens", 0),
            ("max_chunk_tokens", 0),
            ("max_seconds", 0.0),
        ):
            self.require(getattr(self, key) >= least, key, f"must be at least {least}")
        self.require(self.max_seconds < float("inf"), "max_seconds", "must be finite")
        self.require(self.prefill_wait_ms < float("inf"), "prefill_wait_ms", "must be finite")
        self.require(self.refresh_seconds > 0, "refresh_seconds", "must be positive")
        self.cache_by_priority()
        self.worker_pools()

    def described(self, record: ProcessRecord) -> ProcessRecord:
        return replace(record, pools=self.pools)

    def worker_pools(self) -> Pools:
        """Parsed ``pools``."""
        try:
            return parse_pools(self.pools)
        except ValueError as error:
            raise ConfigError(f"planner.pools {POOL_ENTRIES}, each tenant and tier once, got {str(error)!r}") from error

    def cache_by_priority(self) -> dict[int, CachePolicy]:
        """Parsed ``cache_classes``."""
        found: dict[int, CachePolicy] = {}
        for entry in self.cache_classes:
            parts = CACHE_ENTRY.fullmatch(entry)
            self.require(parts is not None, "cache_classes", CACHE_ENTRIES)
            if parts is not None:
                found[int(parts[1])] = CachePolicy(CacheClass(parts[2]), int(parts[3] or 0))
        return found
