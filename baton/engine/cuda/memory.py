"""How much of the GPU's memory the KV pool gets: what is left once everything else has been allocated and used once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from baton.core.errors import ConfigError
from baton.core.types import KvFormat
from baton.engine.config import EngineConfig

_MEGABYTE = 1 << 20


@contextmanager
def refused_when_full(what: str, device: torch.device) -> Iterator[None]:
    """Turns torch's out-of-memory error into a ConfigError that says what did not fit and how much there is."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"engine.model: {what} does not fit the GPU: {free >> 20} MB of {total >> 20} MB are left"
        ) from error


def check_weights_fit(weight_bytes: int, config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError, before anything is read, when the weights alone are larger than what may be used."""
    usable = usable_bytes(config.gpu_memory_share, device)
    if weight_bytes > usable:
        raise ConfigError(
            f"engine.model: the weights take {weight_bytes / 1e6:.0f} MB, the GPU has {usable / 1e6:.0f} MB available "
            f"within engine.gpu_memory_share {config.gpu_memory_share}"
        )


def usable_bytes(share: float, device: torch.device) -> int:
    """Bytes that can still be taken until ``share`` of the GPU's memory is in use, by whomever.

    What torch's allocator keeps for later counts as used.
    """
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(free - (1.0 - share) * total))


def fixed_blocks(config: EngineConfig, layout: KvFormat) -> int:
    """The pool's blocks when the configuration names a size; 0 when it leaves that to ``measured_blocks``."""
    return config.kv_blocks or (config.kv_cache_mb * _MEGABYTE) // layout.block_bytes


def measured_blocks(config: EngineConfig, layout: KvFormat, device: torch.device, spare: int) -> int:
    """Blocks that fit what is left, less ``spare`` ones. Call it when all else is allocated.

    Raises ConfigError when that is not even one.
    """
    usable = usable_bytes(config.gpu_memory_share, device)
    blocks = usable // layout.block_bytes - spare
    if blocks < 1:
        raise ConfigError(
            f"engine.gpu_memory_share: {config.gpu_memory_share} leaves {usable / 1e6:.1f} MB for the KV pool, "
            f"which needs at least {(1 + spare) * layout.block_bytes / 1e6:.1f} MB"
        )
    return blocks
