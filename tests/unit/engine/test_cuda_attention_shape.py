"""Which attention backends serve which shapes. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.core.errors import ConfigError
from baton.engine.cuda.attention import DecodeBackend, decode_backend, engine_kernels, prefill_kernel, serves_windows
from baton.engine.cuda.attention_shape import AttentionShape, KvScale
from baton.engine.cuda.flashinfer_kernels import Kernel

LLAMA = AttentionShape(layers=4, heads=32, kv_heads=8, head_dim=128, block_size=16, scale=128**-0.5)


def test_common_shapes_decode_without_a_plan() -> None:
    for heads, kv_heads, head_dim in ((32, 8, 128), (16, 8, 128), (9, 3, 64), (14, 2, 64), (64, 8, 128)):
        shape = replace(LLAMA, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        assert decode_backend(shape) is DecodeBackend.SPLIT


def test_what_our_kernel_lacks_falls_to_flashinfer() -> None:
    assert decode_backend(replace(LLAMA, head_dim=256)) is DecodeBackend.TENSOR_CORES
    assert decode_backend(replace(LLAMA, heads=128)) is DecodeBackend.TENSOR_CORES
    assert decode_backend(replace(LLAMA, heads=8, block_size=8)) is DecodeBackend.CUDA_CORES


def test_an_fp8_pool_is_read_by_fp8_prefill() -> None:
    assert prefill_kernel(LLAMA) is Kernel.FA3
    assert prefill_kernel(replace(LLAMA, kv_dtype=torch.float8_e4m3fn)) is Kernel.FA3_FP8


def test_a_window_of_one_shows_the_token_itself() -> None:
    assert replace(LLAMA, window=1).window_left == 0
    assert LLAMA.window_left == -1


def test_rows_may_have_windows_of_their_own_where_our_kernel_decodes() -> None:
    assert serves_windows(LLAMA)
    assert serves_windows(replace(LLAMA, window=100, kv_dtype=torch.float8_e4m3fn))
    assert not serves_windows(replace(LLAMA, head_dim=256))


def test_a_window_over_an_fp8_pool_is_not_given_to_the_kernel_that_has_none() -> None:
    narrow = replace(LLAMA, kv_dtype=torch.float8_e4m3fn)
    assert prefill_kernel(narrow.windowed) is Kernel.FA2
    assert prefill_kernel(LLAMA.windowed) is Kernel.FA3


def test_the_kernels_for_windows_are_compiled_ahead_where_requests_may_have_one() -> None:
    assert engine_kernels(LLAMA) == [(LLAMA, Kernel.FA3), (LLAMA.windowed, Kernel.FA3)]
    narrow = replace(LLAMA, kv_dtype=torch.float8_e4m3fn)
    assert engine_kernels(narrow) == [(narrow, Kernel.FA3_FP8), (narrow.windowed, Kernel.FA2)]
    own = replace(LLAMA, window=100)
    assert engine_kernels(own) == [(own, Kernel.FA3)]
    wide = replace(LLAMA, head_dim=256)
    assert engine_kernels(wide) == [(wide, Kernel.FA2), (wide, Kernel.FA3)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"head_dim": 96}, "head_dim"),
        ({"heads": 33}, "heads"),
        ({"kv_dtype": torch.float16}, "kv_dtype"),
        ({"kv_scales": (KvScale(),)}, "kv_scales"),
    ],
)
def test_shapes_without_kernels_are_refused_by_name(change: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(LLAMA, **change)  # pyright: ignore[reportArgumentType]


def test_a_pool_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="pool"):
        LLAMA.layer_views(torch.zeros(3, 4, 2, 8, 32, 128, dtype=torch.bfloat16))


def test_layer_views_share_the_pools_memory() -> None:
    pool = torch.zeros(3, 4, 2, 8, 16, 128, dtype=torch.bfloat16)
    k, v = LLAMA.layer_views(pool)[2]
    k[1, 7, 3, 5], v[1, 7, 3, 5] = 1.0, 2.0
    assert pool[1, 2, :, 7, 3, 5].tolist() == [1.0, 2.0]
