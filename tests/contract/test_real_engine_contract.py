"""The promises of every engine, kept by real models in float32: both backends, dense, windowed and sparse layers."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractAsyncContextManager
from typing import ClassVar

import pytest

from baton.engine.client import EngineClient, spawn_engine, threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.load import build_runner
from tests.contract.engine_contract import EngineContract
from tests.goldens import DATA
from tests.real_engines import AheadRunner


class RealContract(EngineContract):
    model: ClassVar[str]
    backend: ClassVar[str] = "native"

    def config(self, **changes: object) -> EngineConfig:
        model = str(DATA / "tiny" / self.model)
        return dataclasses.replace(
            super().config(**changes), model=model, dtype="float32", backend=self.backend, threads=1
        )

    def open(self, config: EngineConfig) -> AbstractAsyncContextManager[EngineClient]:
        return threaded_engine(build_runner(config), config)


class TestNativeLlama(RealContract):
    model = "llama-gqa-untied"


class TestNativeSlidingWindow(RealContract):
    """With blocks of 16 the suite's prompts are longer than the window of 48."""

    model = "mistral-window"
    block_size = 16
    chunk_sizes = (1, 15, 16, 17, 64)


class TestNativeMixture(RealContract):
    model = "qwen3-moe"


class TestTorchLlama(RealContract):
    model = "llama-gqa-tied"
    backend = "torch"


class TestNativeLlamaOneStepAhead(RealContract):
    model = "llama-gqa-tied"

    def open(self, config: EngineConfig) -> AbstractAsyncContextManager[EngineClient]:
        return threaded_engine(AheadRunner(build_runner(config)), config)


@pytest.mark.slow
class TestSpawnedReal(RealContract):
    """In a process of its own; each test starts one and waits for torch."""

    model = "qwen2"

    def open(self, config: EngineConfig) -> AbstractAsyncContextManager[EngineClient]:
        return spawn_engine(config)
