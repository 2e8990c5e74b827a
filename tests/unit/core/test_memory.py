"""Freed large buffers stay in the process for the next one."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from baton.core.memory import keep_large_buffers
if sys.argv[1] == "keep":
    keep_large_buffers()
size = 16 << 20
bytes(bytearray(size))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    bytes(bytearray(size))
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * 4096 / size)
"""


def faulted(mode: str) -> float:
    """Page faults of ten 16 MB copies, in buffers of that size."""
    result = subprocess.run(
        [sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, timeout=60, check=True
    )
    return float(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_large_buffers_are_reused_without_page_faults() -> None:
    if faulted("leave") < 5:
        pytest.skip("this C library reuses them by itself")
    assert faulted("keep") < 1
