"""The paged KV cache as memory: one block-major tensor, and blocks in and out of it as bytes.

Which block belongs to whom is decided elsewhere; here a block id is only an index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from baton.core.errors import ConfigError, CorruptTransfer
from baton.engine.spec import DecoderSpec

_CGROUP = Path("/sys/fs/cgroup")


def block_bytes(spec: DecoderSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of ``block_size`` tokens."""
    return block_size * spec.kv_bytes_per_token(dtype.itemsize)


def allocate_pool(
    spec: DecoderSpec, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A zeroed pool [blocks, layers, 2 (K, V), kv_heads, block_size, head_dim], contiguous.

    On the CPU pages become resident when they are first written. Raises ConfigError naming the bytes needed and
    available when the memory does not suffice.
    """
    needed, available = blocks * block_bytes(spec, block_size, dtype), available_bytes(device)
    if needed > available:
        raise ConfigError(
            f"engine.kv_cache_mb (or engine.kv_blocks): must fit the {available / 1e6:.0f} MB available on "
            f"{device.type}, got {needed / 1e6:.0f} MB for {blocks} blocks of {block_size} tokens"
        )
    shape = (blocks, spec.layers, 2, spec.kv_heads, block_size, spec.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def available_bytes(device: torch.device) -> float:
    """Memory that can still be taken: of the GPU, or of the machine and the container around this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, _cgroup_headroom(_CGROUP))


def read_blocks(pool: torch.Tensor, block_ids: Sequence[int]) -> bytes:
    """The bytes of the blocks, one after another in the order of ``block_ids``."""
    _check_ids(pool, block_ids)
    if pool.device.type != "cpu":
        taken = pool[torch.tensor(block_ids, dtype=torch.int64, device=pool.device)].cpu()
        return _as_bytes(taken).data.tobytes()
    rows = _as_bytes(pool)
    return b"".join(rows[block].data for block in block_ids)


def write_blocks(pool: torch.Tensor, block_ids: Sequence[int], data: bytes | bytearray | memoryview) -> None:
    """Fill the blocks from ``data``, laid out as ``read_blocks`` returns it.

    Raises CorruptTransfer, before anything is written, when the length of ``data`` is not that of the blocks.
    """
    _check_ids(pool, block_ids)
    size = math.prod(pool.shape[1:]) * pool.element_size()
    view = memoryview(data).cast("B")
    if len(view) != size * len(block_ids):
        raise CorruptTransfer(f"{len(block_ids)} KV blocks take {size * len(block_ids)} bytes, got {len(view)}")
    if not block_ids:
        return
    source = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    rows = pool.view(pool.shape[0], -1).view(torch.uint8)
    for row, block in enumerate(block_ids):
        rows[block].copy_(source[row * size : (row + 1) * size])


def _as_bytes(pool: torch.Tensor) -> NDArray[np.uint8]:
    return pool.view(pool.shape[0], -1).view(torch.uint8).numpy()


def _check_ids(pool: torch.Tensor, block_ids: Sequence[int]) -> None:
    for block in block_ids:
        if not 0 <= block < pool.shape[0]:
            raise ValueError(f"block id {block} is not in a pool of {pool.shape[0]} blocks")


def _cgroup_headroom(root: Path) -> float:
    """What the container's memory limit (cgroup v2) leaves; page cache counts as free. Infinite without a limit."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return math.inf
    if limit == "max":
        return math.inf
    return max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))
