"""Pools on a GPU for tests of copies between them, and another process that owns one.

``with exporter(...) as other`` starts a process with a pool of seeded random blocks, which this process can map and
copy from, and make again for itself to compare with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from baton.core.types import DevicePool, KvFormat
from baton.engine.cuda.build import COPYING, build
from baton.engine.cuda.copies import CudaCopies
from baton.engine.cuda.library import CudaLibrary
from baton.engine.device_copies import Copy, Span
from bench.gpu_processes import Deeds, GpuProcess, gpu_process

TINY = KvFormat("float32", block_size=4, layers=3, kv_heads=2, head_dim=8)
LLAMA_8B = KvFormat("bfloat16", block_size=16, layers=32, kv_heads=8, head_dim=128)


def library() -> CudaLibrary:
    return CudaLibrary(build(names=COPYING))


def random_pool(layout: KvFormat, blocks: int, seed: int) -> torch.Tensor:
    """uint8 [blocks, bytes of one], the same in every process of one GPU model."""
    generator = torch.Generator("cuda").manual_seed(seed)
    words = torch.randint(-(2**62), 2**62, (blocks, layout.block_bytes // 8), generator=generator, device="cuda")
    return words.view(torch.uint8)


def copies_over(pool: torch.Tensor, layout: KvFormat) -> CudaCopies:
    torch.cuda.synchronize()
    return CudaCopies(library(), pool, layout, [torch.cuda.current_stream()])


def waited(copy: Copy) -> list[bytes]:
    """The digests of the blocks, once it is done."""
    while not copy.is_done():
        pass
    joined = copy.digests()
    return [joined[at : at + 16] for at in range(0, len(joined), 16)]


def span(
    count: int, *, first: int = 0, filled: int | None = None, layout: KvFormat = TINY, strong: bool = True
) -> Span:
    return Span(first, layout.block_size if filled is None else filled, bytes([strong]) * count)


@dataclass
class Exporter:
    """The other process, by what it can be told."""

    process: GpuProcess
    pool: DevicePool

    def digests(self, blocks: Sequence[int], wanted: Span) -> list[bytes]:
        return self.process.ask("digests", list(blocks), wanted)

    def flip(self, block: int, bit: int) -> None:
        self.process.ask("flip", block, bit)

    def kill(self) -> None:
        self.process.kill()


@contextmanager
def exporter(layout: KvFormat, blocks: int, seed: int) -> Iterator[Exporter]:
    with gpu_process(0, partial(_deeds, layout, blocks, seed)) as process:
        yield Exporter(process, process.ask("pool"))


def _deeds(layout: KvFormat, blocks: int, seed: int) -> Deeds:
    pool = random_pool(layout, blocks, seed)
    copies = copies_over(pool, layout)

    def flip(block: int, bit: int) -> None:
        pool[block, bit // 8] ^= 1 << bit % 8
        torch.cuda.synchronize()

    return {
        "pool": lambda: copies.pool,
        "digests": lambda blocks, wanted: waited(copies.digest(blocks, wanted)),
        "flip": flip,
    }
