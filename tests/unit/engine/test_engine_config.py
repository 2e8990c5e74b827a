from __future__ import annotations

import pytest

from baton.core.config import Section, Setting, Settings
from baton.core.errors import ConfigError
from baton.core.types import Tier
from baton.engine.config import EngineConfig, device_defaults
from baton.engine.tiers import TierPolicy


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
        ("tenant_block_share", 0.0),
        ("tenant_block_share", 1.1),
        ("reserve_idle_seconds", -1.0),
        ("prompt_token_weight", 0.0),
        ("output_token_weight", float("inf")),
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


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        ("lead=1:0:1", "entries TIER=WEIGHT:RESERVED:BOUND, TIER one of gold, silver, bronze"),
        ("gold=1:0", "entries"),
        ("gold=1:x:1", "entries"),
        ("gold=0:0:1", "weights above 0"),
        ("gold=nan:0:1", "weights above 0"),
        ("gold=1:1.5:1", "reserved shares from 0 to 1"),
        ("gold=1:nan:1", "reserved shares from 0 to 1"),
        ("gold=1:0:0", "bounds above 0"),
        ("gold=1:0.9:1", "at most 1 in all"),  # beside what silver and bronze have by default
    ],
)
def test_a_tier_that_cannot_be_kept_to_is_refused_with_its_entry(entry: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.tiers must .*{rule}.*, got ") as caught:
        EngineConfig(tiers=(entry,))
    assert entry in caught.value.message or "1.2" in caught.value.message


def test_a_tier_is_named_once() -> None:
    with pytest.raises(ConfigError, match="must name a tier once"):
        EngineConfig(tiers=("gold=1:0:1", "gold=2:0:1"))


def test_tiers_that_are_not_named_are_as_by_default() -> None:
    policies = Settings([Setting("engine", "tiers", "bronze=2:0.2:7", "a test")]).fill(Section("engine", EngineConfig))
    default = EngineConfig().tier_policies()
    assert policies.tier_policies() == {**default, Tier.BRONZE: TierPolicy(2.0, 0.2, 7.0)}
