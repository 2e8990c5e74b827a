"""How fast this machine reads memory: the ceiling of single-stream decode, which reads every weight once a token."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

BYTES_PER_THREAD = 512 << 20
PASSES = 5


def read_bandwidth(threads: int) -> float:
    """The best of a few passes, in GB/s, over buffers far larger than the caches."""
    buffers = [np.ones(BYTES_PER_THREAD // 8, np.int64) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PASSES):
            started = time.perf_counter()
            for total in pool.map(np.max, buffers):  # releases the interpreter lock, and vectorises
                assert total == 1
            best = max(best, threads * BYTES_PER_THREAD / (time.perf_counter() - started) / 1e9)
    return round(best, 2)
