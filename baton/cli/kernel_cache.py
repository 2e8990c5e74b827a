"""``baton model warm``: what the first engine on a GPU would compile and measure, done before it is needed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from baton.cli.models import ResolvedModel
from baton.cli.terminal import say
from baton.cli.up import check_settings
from baton.core.config import Section, Settings
from baton.core.errors import ConfigError
from baton.engine.config import EngineConfig, device_defaults

_BLOCKS = 1  # of the KV pool: what is kept depends on no other size


def fill(model: ResolvedModel, config: Path | None, flags: Sequence[str]) -> Path:
    """Start an engine of ``model`` as ``flags`` say, so that all that it looks for is in its kernel cache, and end it.

    Returns the cache. Raises ConfigError for settings that compile nothing, CudaUnavailable when there is no GPU, or
    nvcc or FlashInfer are missing.
    """
    check_settings(config, flags)
    settings = Settings.read(file=config, environ=os.environ, flags=[*flags, f"engine.model={model.engine_model}"])
    wanted = settings.fill(Section("engine", EngineConfig, device_defaults))
    if wanted.device != "cuda" or wanted.backend == "torch" or model.engine_model == "fake":
        raise ConfigError(
            "model warm: only a model on backend cuda has kernels to compile, got "
            f"{model.name} on engine.device {wanted.device}, engine.backend {wanted.backend}"
        )
    from baton.engine.load import build_runner  # pulls in torch

    begun = time.monotonic()
    say(f"{model.name}: compiling kernels and measuring products; minutes at first")
    build_runner(replace(wanted, kv_blocks=_BLOCKS)).close()
    say(f"done in {time.monotonic() - begun:.1f} s")
    return Path(wanted.kernel_cache).expanduser()
