"""The two processes of ``bench.cuda_transfer``: one that owns a pool, one that copies out of it."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from baton.core.types import DevicePool, KvFormat
from baton.engine.cuda.block_copy import BlockCopier, CopyTable, HostTable
from baton.engine.cuda.build import COPYING, build
from baton.engine.cuda.copies import CudaCopies, CudaMapping
from baton.engine.cuda.library import CudaLibrary
from baton.engine.device_copies import Copy, Span
from baton.engine.digest import LANES
from bench.gpu_processes import Deeds

LLAMA_8B = KvFormat("bfloat16", block_size=16, layers=32, kv_heads=8, head_dim=128)
BLOCKS = 2048  # 4 GiB: nothing that is copied twice is found in a cache
CHECKED = 512
SEED = 1
IN_A_ROW = 8
WARM_UPS = 3
JOIN_SECONDS = 30.0


def exporting() -> Deeds:
    end = _End(_random_pool(SEED))
    return end.deeds() | {
        "pool": lambda: end.copies.pool,
        "digests": lambda: end.waited(end.copies.digest(_scattered(CHECKED), end.span(CHECKED))),
        "digest": end.digest,
    }


def importing() -> Deeds:
    end = _Importer(torch.zeros(BLOCKS, LLAMA_8B.block_bytes, dtype=torch.uint8, device="cuda"))
    return end.deeds() | {
        "map": end.map,
        "pulled_digests": end.pulled_digests,
        "is_equal": end.is_equal,
        "copy": end.copy,
        "copy_small": end.copy_small,
        "ctas": end.with_ctas,
        "host": end.host,
    }


def _random_pool(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    words = torch.randint(-(2**62), 2**62, (BLOCKS, LLAMA_8B.block_bytes // 8), generator=generator, device="cuda")
    return words.view(torch.uint8)


def _scattered(count: int, seed: int = 2) -> list[int]:
    """As blocks of a request stand in a pool that has been in use for a while."""
    return np.random.default_rng(seed).permutation(BLOCKS)[:count].tolist()


@dataclass(frozen=True, slots=True)
class _Work:
    """A launch's table and digests (None: it makes none), on the device, and which blocks."""

    table: torch.Tensor
    digests: torch.Tensor | None
    span: Span


class _End:
    """What both can do: digest their own pool, and move bytes by NCCL."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.pool = pool
        torch.cuda.synchronize()
        self.library = CudaLibrary(build(names=COPYING))
        self.copies = CudaCopies(self.library, pool, LLAMA_8B, [torch.cuda.current_stream()])
        self.copies.warm_up()
        self._pair: Any = None

    def deeds(self) -> dict[str, Callable[..., Any]]:
        return {
            "nccl_invite": lambda: bytes(_nccl().get_unique_id()),
            "nccl_join": self.nccl_join,
            "nccl_move": self.nccl_move,
            "nccl_leave": self.nccl_leave,
        }

    def span(self, count: int, *, strong: bool = True) -> Span:
        return Span(0, LLAMA_8B.block_size, bytes([strong]) * count)

    def waited(self, copy: Copy) -> bytes:
        while not copy.is_done():
            pass
        return copy.digests()

    def digest(self, count: int, repeats: int) -> dict[str, float]:
        """Milliseconds that the owner's own digest of ``count`` blocks takes."""
        found: dict[str, float] = {}
        for name, strong in (("light_ms", False), ("strong_ms", True)):
            work = self._work(_scattered(count), _scattered(count), strong=strong)
            found[name] = self._timed(work, self.copies.address, None, self.copies.local_ctas, repeats)
        return found

    def nccl_join(self, invitation: bytes, rank: int, ctas: int) -> float:
        core = _nccl()
        config = core.NCCLConfig(blocking=False) if not ctas else core.NCCLConfig(blocking=False, max_ctas=ctas)
        began = time.monotonic()
        self._pair = core.Communicator.init(2, rank, core.UniqueId.from_bytes(invitation), config)
        self._rank = rank
        self._settle()
        return round(time.monotonic() - began, 3)

    def nccl_move(self, size: int, repeats: int) -> dict[str, float]:
        """Rank 0 sends, rank 1 receives: a message by itself, with what its launch takes, and several in a row."""
        single, row = self._nccl_ms(size, 1, repeats), self._nccl_ms(size, IN_A_ROW, repeats)
        rates = {"gb_s": round(size / single / 1e6, 2), "row_gb_s": round(size / row / 1e6, 2)}
        return {"ms": round(single, 4), "row_ms": round(row, 4)} | rates

    def _nccl_ms(self, size: int, messages: int, repeats: int) -> float:
        """Milliseconds of one of ``messages`` in a row, median."""
        stream, flat = self.copies.stream, self.pool.view(-1)[:size]
        call = self._pair.send if self._rank == 0 else self._pair.recv
        taken: list[float] = []
        for turn in range(WARM_UPS + repeats):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record(stream)
            for _ in range(messages):
                call(flat, 1 - self._rank, stream=stream.cuda_stream)
                self._settle()
            ended.record(stream)
            ended.synchronize()
            if turn >= WARM_UPS:
                taken.append(began.elapsed_time(ended) / messages)
        return statistics.median(taken)

    def nccl_leave(self) -> None:
        self._pair.abort()
        self._pair = None

    def _settle(self) -> None:
        deadline = time.monotonic() + JOIN_SECONDS
        while (state := int(self._pair.get_async_error())) != 0:
            if state != 7 or time.monotonic() > deadline:
                raise RuntimeError(f"NCCL: ncclResult {state}")

    def _work(self, source_ids: list[int], target_ids: list[int], *, strong: bool, digested: bool = True) -> _Work:
        count = len(source_ids)
        host = np.zeros(CopyTable.bytes_for(count), np.uint8)
        span = self.span(count, strong=strong)
        HostTable(host, count).write(source_ids, target_ids, span.strong)
        digests = torch.zeros(count, len(LANES), dtype=torch.int64, device="cuda") if digested else None
        work = _Work(torch.from_numpy(host).cuda(), digests, span)
        torch.cuda.synchronize()
        return work

    def _timed(self, work: _Work, source: int, target: int | None, ctas: int, repeats: int) -> float:
        """Median milliseconds of the kernel."""
        table = CopyTable(work.table.data_ptr(), work.span.count)
        digests = None if work.digests is None else work.digests.data_ptr()
        stream = self.copies.stream.cuda_stream
        return self._median(
            lambda: self.copies.copier.launch(table, source, target, digests, work.span, ctas, stream), repeats
        )

    def _median(self, launch: Callable[[], None], repeats: int) -> float:
        taken: list[float] = []
        for turn in range(WARM_UPS + repeats):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record(self.copies.stream)
            launch()
            ended.record(self.copies.stream)
            ended.synchronize()
            if turn >= WARM_UPS:
                taken.append(began.elapsed_time(ended))
        return round(statistics.median(taken), 5)


class _Importer(_End):
    """Copies out of the pool that it has mapped."""

    _mapping: CudaMapping

    def map(self, pool: DevicePool) -> None:
        self._mapping = self.copies.open(pool)

    def pulled_digests(self) -> bytes:
        ids = _scattered(CHECKED)
        return self.waited(self.copies.pull(ids, self._mapping, ids, self.span(CHECKED)))

    def is_equal(self) -> bool:
        """All that was pulled, against the same random numbers made here."""
        ids, expected = _scattered(CHECKED), _random_pool(SEED)
        return torch.equal(self.pool[ids], expected[ids])

    def copy(self, count: int, repeats: int) -> dict[str, Any]:
        """The kernel with no, light and strong digests, and the copy engines: milliseconds and GB/s."""
        source_ids, target_ids = _scattered(count), _scattered(count, seed=3)
        source, ctas = self._mapping.memory.address, self._mapping.ctas
        found: dict[str, float] = {}
        for name, strong, digested in (("kernel", False, False), ("light", False, True), ("strong", True, True)):
            work = self._work(source_ids, target_ids, strong=strong, digested=digested)
            found[f"{name}_ms"] = self._timed(work, source, self.copies.address, ctas, repeats)
        ids = (np.array(source_ids, np.int32), np.array(target_ids, np.int32))
        stream, launch = self.copies.stream.cuda_stream, self.copies.copier.launch_by_engine
        found["engine_ms"] = self._median(lambda: launch(source, self.copies.address, *ids, stream), repeats)
        size = count * LLAMA_8B.block_bytes
        rates = {name.replace("_ms", "_gb_s"): round(size / each / 1e6, 1) for name, each in found.items()}
        return {"blocks": count, "bytes": size, "ctas": ctas} | found | rates

    def copy_small(self, repeats: int) -> dict[str, Any]:
        """One block of half the size, 1 MiB, with a light digest."""
        half = BlockCopier(self.library, replace(LLAMA_8B, block_size=LLAMA_8B.block_size // 2))
        work = self._work([7], [9], strong=False)
        table, span = CopyTable(work.table.data_ptr(), 1), replace(work.span, filled=LLAMA_8B.block_size // 2)
        assert work.digests is not None
        source, target, digests = self._mapping.memory.address, self.copies.address, work.digests.data_ptr()
        stream = self.copies.stream.cuda_stream
        milliseconds = self._median(
            lambda: half.launch(table, source, target, digests, span, self._mapping.ctas, stream), repeats
        )
        size = LLAMA_8B.block_bytes // 2
        return {"blocks": 1, "bytes": size, "light_ms": milliseconds, "light_gb_s": round(size / milliseconds / 1e6, 1)}

    def with_ctas(self, count: int, ctas: int, repeats: int) -> dict[str, float]:
        """The kernel with light digests on so many CTAs."""
        work = self._work(_scattered(count), _scattered(count, seed=3), strong=False)
        milliseconds = self._timed(work, self._mapping.memory.address, self.copies.address, ctas, repeats)
        size = count * LLAMA_8B.block_bytes
        return {"ctas": ctas, "light_ms": milliseconds, "light_gb_s": round(size / milliseconds / 1e6, 1)}

    def host(self, count: int, repeats: int) -> dict[str, float]:
        """As an engine does it: from the command to the digests in its hands, by the host's clock."""
        source_ids, target_ids, span = _scattered(count), _scattered(count, seed=3), self.span(count, strong=False)
        queued: list[float] = []
        taken: list[float] = []
        for turn in range(WARM_UPS + repeats):
            began = time.perf_counter()
            copy = self.copies.pull(target_ids, self._mapping, source_ids, span)
            launched = time.perf_counter()
            self.waited(copy)
            if turn >= WARM_UPS:
                queued.append(launched - began)
                taken.append(time.perf_counter() - began)
        return {
            "queue_ms": round(1000 * statistics.median(queued), 4),
            "pull_ms": round(1000 * statistics.median(taken), 4),
        }


def _nccl() -> Any:
    return importlib.import_module("nccl.core")
