"""Settings of one inference engine (section ``engine``)."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``model``: ``fake``, a Hugging Face directory or ``random:CONFIG``; ``served_name`` is what clients call it."""

    model: str = "fake"
    served_name: str = ""
    dtype: str = "bfloat16"  # float32 | bfloat16
    device: str = "cpu"
    backend: str = "auto"  # auto | native | torch
    threads: int = 2
    block_size: int = 16
    kv_cache_mb: int = 256
    kv_blocks: int = 0  # 0: as many as fit kv_cache_mb
    max_step_tokens: int = 512  # new tokens computed in one step, prefill chunks included
    max_running: int = 64  # sequences in one step
    max_waiting: int = 256  # bounded queue before admission; full means Overloaded
    growth_window: int = 256  # output tokens whose blocks are reserved at admission
    seed: int = 0  # of random weights
    fake_step_ms: float = 0.0  # how long a step of the model "fake" takes

    def __post_init__(self) -> None:
        self._require(self.dtype in ("float32", "bfloat16"), "dtype", "must be float32 or bfloat16")
        self._require(self.backend in ("auto", "native", "torch"), "backend", "must be auto, native or torch")
        self._require(self.device == "cpu", "device", "must be cpu in this version")
        size = self.block_size
        self._require(
            1 <= size <= 1024 and not size & (size - 1), "block_size", "must be a power of two from 1 to 1024"
        )
        for key in ("threads", "max_step_tokens", "max_running", "max_waiting"):
            self._require(getattr(self, key) >= 1, key, "must be at least 1")
        for key in ("kv_cache_mb", "kv_blocks", "growth_window", "fake_step_ms"):
            self._require(getattr(self, key) >= 0, key, "must not be negative")

    def _require(self, holds: bool, key: str, limit: str) -> None:
        if not holds:
            raise ConfigError(f"engine.{key} {limit}, got {getattr(self, key)!r}")
