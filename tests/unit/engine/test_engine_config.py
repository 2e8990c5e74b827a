from __future__ import annotations

import pytest

from baton.core.errors import ConfigError
from baton.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", 0),
        ("block_size", 12),
        ("block_size", 2048),
        ("threads", 0),
        ("max_step_tokens", 0),
        ("max_running", 0),
        ("max_waiting", 0),
        ("kv_cache_mb", -1),
        ("kv_blocks", -1),
        ("growth_window", -1),
        ("fake_step_ms", -0.1),
        ("dtype", "float16"),
        ("backend", "magic"),
        ("device", "cuda"),
    ],
)
def test_a_setting_that_no_engine_can_run_with_is_named_with_its_value(key: str, value: float | str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{key} must .*, got {value!r}"):
        EngineConfig(**{key: value})  # type: ignore[arg-type]
