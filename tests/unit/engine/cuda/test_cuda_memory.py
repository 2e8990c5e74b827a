from __future__ import annotations

import pytest
import torch

from baton.core.errors import ConfigError
from baton.core.types import KvFormat
from baton.engine.config import EngineConfig
from baton.engine.cuda.build import CudaUnavailable
from baton.engine.cuda.device import hopper
from baton.engine.cuda.memory import (
    check_weights_fit,
    fixed_blocks,
    measured_blocks,
    refused_when_full,
    usable_bytes,
)
from baton.engine.load import build_runner
from tests.goldens import DATA

GPU = torch.device("cuda", 0)
MB = 1 << 20
LAYOUT = KvFormat("bfloat16", 16, 2, 2, 64)  # blocks of 16 KiB


@pytest.fixture(autouse=True)
def _half_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (500 * MB, 1000 * MB))


def config(**changes: object) -> EngineConfig:
    return EngineConfig(device="cuda", **changes)  # type: ignore[arg-type]


def test_the_share_counts_what_others_use() -> None:
    assert usable_bytes(1.0, GPU) == 500 * MB
    assert usable_bytes(0.9, GPU) == 400 * MB
    assert usable_bytes(0.4, GPU) == 0


def test_the_pool_takes_what_is_left_but_the_spare_block() -> None:
    assert measured_blocks(config(gpu_memory_share=0.9), LAYOUT, GPU, spare=1) == 400 * MB // LAYOUT.block_bytes - 1


def test_a_pool_that_holds_no_block_is_refused_with_figures() -> None:
    with pytest.raises(ConfigError, match=r"engine\.gpu_memory_share: 0\.4 leaves 0\.0 MB .* needs at least 0\.\d MB"):
        measured_blocks(config(gpu_memory_share=0.4), LAYOUT, GPU, spare=1)


def test_a_given_size_wins_over_what_is_left() -> None:
    assert fixed_blocks(config(kv_blocks=7, kv_cache_mb=100), LAYOUT) == 7
    assert fixed_blocks(config(kv_cache_mb=1), LAYOUT) == MB // LAYOUT.block_bytes
    assert fixed_blocks(config(kv_cache_mb=0), LAYOUT) == 0


def test_weights_larger_than_the_gpu_are_refused_before_they_are_read() -> None:
    check_weights_fit(400 * MB, config(), GPU)
    with pytest.raises(ConfigError, match=r"engine\.model: the weights take 420 MB, the GPU has 419 MB available"):
        check_weights_fit(420_000_000, config(), GPU)


def test_memory_that_runs_out_while_loading_is_told_in_one_line() -> None:
    with (
        pytest.raises(ConfigError, match=r"engine\.model: a model does not fit the GPU: 500 MB of 1000 MB are left"),
        refused_when_full("a model", GPU),
    ):
        raise torch.OutOfMemoryError


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for backend in ("auto", "torch"):
        with pytest.raises(CudaUnavailable, match=r"engine\.device: cuda needs a GPU and its driver"):
            build_runner(EngineConfig(str(DATA / "tiny" / "qwen3"), device="cuda", backend=backend))


def test_a_gpu_that_the_kernels_are_not_compiled_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "An Older One")
    with pytest.raises(CudaUnavailable, match=r"engine\.backend: cuda needs a Hopper GPU .*, An Older One has 8\.0"):
        hopper(GPU)
