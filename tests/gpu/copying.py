"""Pools on a GPU for tests of copies between them, and another process that owns one.

``with exporter(...) as other`` starts a process with a pool of seeded random blocks, which this process can map and
copy from, and make again for itself to compare with.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from baton.core.types import DevicePool, KvFormat
from baton.engine.cuda.build import COPYING, build
from baton.engine.cuda.copies import CudaCopies
from baton.engine.cuda.library import CudaLibrary
from baton.engine.device_copies import Copy, Span
from tests.gates import GENEROUS_SECONDS

TINY = KvFormat("float32", block_size=4, layers=3, kv_heads=2, head_dim=8)
LLAMA_8B = KvFormat("bfloat16", block_size=16, layers=32, kv_heads=8, head_dim=128)
START_SECONDS = 240.0  # the other process may have to compile, and to load torch


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

    process: BaseProcess
    commands: Connection
    pool: DevicePool

    def ask(self, name: str, *arguments: Any) -> Any:
        self.commands.send((name, *arguments))
        if not self.commands.poll(GENEROUS_SECONDS):
            raise TimeoutError(name)
        answer = self.commands.recv()
        if isinstance(answer, str):
            raise AssertionError(answer)
        return answer

    def digests(self, blocks: Sequence[int], wanted: Span) -> list[bytes]:
        return self.ask("digests", list(blocks), wanted)

    def flip(self, block: int, bit: int) -> None:
        self.ask("flip", block, bit)

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(GENEROUS_SECONDS)
        assert self.process.exitcode == -signal.SIGKILL


@contextmanager
def exporter(layout: KvFormat, blocks: int, seed: int) -> Iterator[Exporter]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_export, args=(theirs, layout, blocks, seed), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_SECONDS):
            raise TimeoutError("the other process does not start")
        pool = ours.recv()
        assert isinstance(pool, DevicePool), pool
        yield Exporter(process, ours, pool)
    finally:
        ours.close()
        process.join(5.0)
        if process.exitcode is None:
            process.kill()
            process.join()


def _export(commands: Connection, layout: KvFormat, blocks: int, seed: int) -> None:
    try:
        pool = random_pool(layout, blocks, seed)
        copies = copies_over(pool, layout)
        commands.send(copies.pool)
        while True:
            name, *arguments = commands.recv()
            commands.send(_obey(copies, pool, name, *arguments))
    except EOFError:
        return
    except BaseException:
        commands.send(traceback.format_exc())
        raise


def _obey(copies: CudaCopies, pool: torch.Tensor, name: str, *arguments: Any) -> Any:
    if name == "digests":
        blocks, wanted = arguments
        return waited(copies.digest(blocks, wanted))
    assert name == "flip"
    block, bit = arguments
    pool[block, bit // 8] ^= 1 << bit % 8
    torch.cuda.synchronize()
    return True
