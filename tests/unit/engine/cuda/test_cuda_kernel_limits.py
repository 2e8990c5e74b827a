"""What the row-wise kernels refuse, before any GPU is touched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine.cuda.build import CudaUnavailable
from baton.engine.cuda.kernels import check_rows
from baton.engine.cuda.library import CudaLibrary, stream_lookup
from baton.engine.spec import DecoderSpec, MoeSpec, RopeSpec

SPEC = DecoderSpec("llama", 1000, 4096, 4096, 14_336, 3, 32, 8, 128, 1e-5, RopeSpec(5e5), tied_head=False)


def test_common_sizes_fit() -> None:
    check_rows(SPEC)
    check_rows(replace(SPEC, hidden_size=576, ffn_size=1536, head_dim=64))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(SPEC, hidden_size=100), "hidden_size: must be a multiple of 8 up to 32768, got 100"),
        (replace(SPEC, ffn_size=40_000), "ffn_size: must be a multiple of 8 up to 32768, got 40000"),
        (replace(SPEC, head_dim=72), "head_dim: must be a multiple of 16 up to 256, got 72"),
        (replace(SPEC, moe=MoeSpec(4, 2, 60, renormalize=True)), "moe.ffn_size: must be a multiple of 8"),
    ],
)
def test_a_size_the_kernels_cannot_take_is_refused_by_name(spec: DecoderSpec, message: str) -> None:
    with pytest.raises(CudaUnavailable, match=message):
        check_rows(spec)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_text("no machine code")
    with pytest.raises(CudaUnavailable, match=f"cannot load {path}"):
        CudaLibrary(path)


def test_the_cpu_is_no_device_for_kernels() -> None:
    with pytest.raises(CudaUnavailable, match="device: must be a GPU that torch can use, got cpu"):
        stream_lookup(torch.device("cpu"))
