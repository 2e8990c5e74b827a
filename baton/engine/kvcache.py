"""The paged KV cache as memory: one block-major tensor, and blocks in and out of it as bytes.

Which block belongs to whom is decided elsewhere; here a block id is only an index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from baton.core.errors import ConfigError, CorruptTransfer
from baton.core.types import KvFormat
from baton.engine.sharedpool import PoolMemory, shared_pool_memory
from baton.engine.spec import DecoderSpec

_CGROUP = Path("/sys/fs/cgroup")
# Blocks pass between a GPU and the host in pieces of about this many bytes, which bounds the memory beside the pool.
COPY_BYTES = 32 << 20


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
    _require_room(spec, blocks, block_size, dtype, device)
    return torch.zeros(_shape(spec, blocks, block_size), dtype=dtype, device=device)


def allocate_shared(
    spec: DecoderSpec, blocks: int, dtype: torch.dtype, layout: KvFormat
) -> tuple[torch.Tensor, PoolMemory | None]:
    """The pool on the CPU, all of it resident, with its memory if that can be shared with other processes; else as
    ``allocate_pool``."""
    device = torch.device("cpu")
    _require_room(spec, blocks, layout.block_size, dtype, device)
    memory = shared_pool_memory(blocks, layout)
    if memory is None:
        return allocate_pool(spec, blocks, layout.block_size, dtype, device), None
    try:
        memory.populate()
    except MemoryError as error:
        raise ConfigError(f"engine.kv_cache_mb (or engine.kv_blocks): must fit memory, got {blocks} blocks") from error
    pool = torch.frombuffer(memory.view, dtype=dtype).view(_shape(spec, blocks, layout.block_size))
    return pool, memory


def _shape(spec: DecoderSpec, blocks: int, block_size: int) -> tuple[int, ...]:
    return (blocks, spec.layers, 2, spec.kv_heads, block_size, spec.head_dim)


def _require_room(spec: DecoderSpec, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    needed, available = blocks * block_bytes(spec, block_size, dtype), available_bytes(device)
    if needed > available:
        raise ConfigError(
            f"engine.kv_cache_mb (or engine.kv_blocks): must fit the {available / 1e6:.0f} MB available on "
            f"{device.type}, got {needed / 1e6:.0f} MB for {blocks} blocks of {block_size} tokens"
        )


def available_bytes(device: torch.device) -> float:
    """Memory that can still be taken: of the GPU, or of the machine and the container around this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, _cgroup_headroom(_CGROUP))


def read_blocks(pool: torch.Tensor, block_ids: Sequence[int]) -> bytes:
    """The bytes of the blocks, one after another in the order of ``block_ids``; of a GPU, on torch's current stream."""
    _check_ids(pool, block_ids)
    if pool.device.type != "cpu":
        return b"".join(_read_from_device(pool, block_ids))
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
    source = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8).view(len(block_ids), size)
    if pool.device.type != "cpu":
        _write_to_device(pool, block_ids, source)
        return
    rows = pool.view(pool.shape[0], -1).view(torch.uint8)
    for row, block in enumerate(block_ids):
        rows[block].copy_(source[row])


def _read_from_device(pool: torch.Tensor, block_ids: Sequence[int]) -> Iterator[bytes]:
    words = _as_words(pool)
    for piece in _pieces(words, block_ids):
        taken = words.index_select(0, torch.tensor(piece, device=pool.device))
        host = torch.empty(taken.shape, dtype=taken.dtype, pin_memory=True).copy_(taken, non_blocking=True)
        torch.cuda.current_stream(pool.device).synchronize()
        yield host.numpy().tobytes()


def _write_to_device(pool: torch.Tensor, block_ids: Sequence[int], source: torch.Tensor) -> None:
    """``source`` is uint8 [blocks, bytes of one]. Returns when it has been read, maybe before the pool is written."""
    words, first = _as_words(pool), 0
    for piece in _pieces(words, block_ids):
        host = source[first : first + len(piece)].view(words.dtype).pin_memory()
        words.index_copy_(0, torch.tensor(piece, device=pool.device), host.to(pool.device, non_blocking=True))
        first += len(piece)


def _as_words(pool: torch.Tensor) -> torch.Tensor:
    """int64 [blocks, words of one]: a block is a multiple of 8 bytes, for K and V and an even head size."""
    return pool.view(pool.shape[0], -1).view(torch.int64)


def _pieces(words: torch.Tensor, block_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    step = max(1, COPY_BYTES // (words.shape[1] * words.element_size()))
    for start in range(0, len(block_ids), step):
        yield block_ids[start : start + step]


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
