"""Settings of one inference engine (section ``engine``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``model``: ``fake``, a directory, a .gguf file or ``random:CONFIG``; ``served_name`` is what clients call it."""

    model: str = "fake"
    served_name: str = ""
    dtype: str = "bfloat16"
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
