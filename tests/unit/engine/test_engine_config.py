from __future__ import annotations

import pytest

from baton.core.config import Section, Setting, Settings
from baton.core.errors import ConfigError
from baton.engine.config import EngineConfig, device_defaults


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
        ("cache_keep_share", -0.1),
        ("cache_keep_share", 1.1),
        ("fake_step_ms", -0.1),
        ("dtype", "float16"),
        ("backend", "magic"),
        ("backend", "cuda"),
        ("device", "tpu"),
        ("weight_format", "int4"),
        ("weight_format", "fp8"),
        ("kv_format", "int8"),
        ("kv_format", "fp8"),
        ("gpu_memory_share", 0.0),
        ("gpu_memory_share", 1.5),
        ("speculation", "always"),
        ("draft_tokens", 0),
        ("draft_tokens", 65),
        ("speculation_max_rows", 1),
        ("draft_kv_cache_mb", 0),
        ("draft_model", "small"),
    ],
)
def test_a_setting_that_no_engine_can_run_with_is_named_with_its_value(key: str, value: float | str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{key} must .*, got {value!r}"):
        EngineConfig(**{key: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("key", "value"), [("backend", "native"), ("dtype", "float32")])
def test_what_no_gpu_backend_computes_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{key} must .* cuda.*, got {value!r}"):
        EngineConfig(device="cuda", **{key: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["weight_format", "kv_format"])
def test_fp8_needs_the_kernels_of_the_gpu(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{key} must be auto except on backend cuda, got 'fp8'"):
        EngineConfig(device="cuda", backend="torch", **{key: "fp8"})  # type: ignore[arg-type]
    assert getattr(EngineConfig(device="cuda", **{key: "fp8"}), key) == "fp8"  # type: ignore[arg-type]


def test_speculation_by_a_model_needs_the_model() -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.draft_model must name a model with engine\.speculation model, got ''"
    ):
        EngineConfig(speculation="model")
    with pytest.raises(ConfigError, match=r"engine\.draft_model must be empty with .* ngram, got 'small'"):
        EngineConfig(speculation="ngram", draft_model="small")


def test_the_reference_backend_runs_in_float32_on_a_gpu() -> None:
    assert EngineConfig(device="cuda", backend="torch", dtype="float32").device == "cuda"


def test_defaults_follow_the_device_and_give_way_to_what_is_set() -> None:
    def filled(**given: object) -> EngineConfig:
        layers = [Setting("engine", key, value, "test") for key, value in given.items()]
        return Settings(layers).fill(Section("engine", EngineConfig, device_defaults))

    assert filled() == EngineConfig()
    on_gpu = filled(device="cuda", max_running=7)
    assert (on_gpu.max_step_tokens, on_gpu.max_running, on_gpu.kv_cache_mb) == (8192, 7, 0)
