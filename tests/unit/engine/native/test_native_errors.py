"""What does not fit is refused by name, before anything is written."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.core.errors import InvalidRequest, ModelError
from baton.engine.decoder import PackedStep
from baton.engine.native import build as build_module
from baton.engine.native.build import NativeUnavailable, build
from baton.engine.native.decoder import NativeDecoder
from tests.unit.engine.native.steps import BLOCK_SIZE, Cache, packed, run
from tests.unit.engine.native.tiny_models import spec_of, weights_of

NAME = "llama-gqa-tied"


@pytest.fixture(scope="module")
def decoder() -> NativeDecoder:
    return NativeDecoder(spec_of(NAME), weights_of(NAME, torch.float32), torch.float32)


def step(**changes: object) -> PackedStep:
    """Two sequences of 3 and 2 tokens, the second continuing at position 20."""
    good = packed([5, 6, 7, 8, 9], [0, 1, 2, 20, 21], [0, 3, 5], [[4, 0], [2, 3]], [2, 4])
    return dataclasses.replace(good, **changes)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": ints(5, 6, 384, 8, 9)}, r"token_ids\[2\] must be in \[0, 384\), got 384"),
        ({"token_ids": ints(-1, 6, 7, 8, 9)}, r"token_ids\[0\] must be in \[0, 384\), got -1"),
        ({"positions": ints(0, 1, 3, 20, 21)}, r"positions\[2\] must be 2, got 3"),
        ({"positions": ints(-1, 0, 1, 20, 21)}, r"positions\[0\] must be in \[0, 1024\), got -1"),
        ({"positions": ints(0, 1, 2, 1023, 1024)}, r"positions\[4\] must be in \[0, 1024\), got 1024"),
        ({"positions": ints(0, 1, 2, 31, 32)}, "sequence 1 needs 3 blocks, its table has 2"),
        ({"seq_starts": ints(0, 3, 6)}, r"seq_starts must ascend from 0 to 5, \[2\] is 6"),
        ({"seq_starts": ints(0, 0, 5)}, r"seq_starts must ascend from 0 to 5, \[1\] is 0"),
        ({"seq_starts": ints(0, 5)}, "seq_starts: must have 3 entries, got 2"),
        ({"block_tables": ints(4, 0, 2, 8).view(2, 2)}, r"sequence 1: blocks must be in \[0, 8\), got 8"),
        ({"block_tables": ints(4, 0, 2, 3)}, "block_tables: must be contiguous int32 with 2 dimensions"),
        ({"logit_rows": ints(2, 5)}, r"logit_rows\[1\] must be in \[0, 5\), got 5"),
        ({"logit_rows": ints(4, 2)}, r"logit_rows\[1\] must be above 4, got 2"),
        ({"token_ids": torch.arange(5)}, "token_ids: must be contiguous int32 with 1 dimensions, got torch.int64"),
        ({"positions": ints(0, 1)}, "positions: must have 5 entries, got 2"),
        ({"token_ids": ints(), "positions": ints()}, "token_ids: must not be empty"),
    ],
)
def test_a_wrong_step_is_refused_by_name_and_writes_nothing(
    decoder: NativeDecoder, changes: dict[str, torch.Tensor], message: str
) -> None:
    cache = Cache(decoder, blocks=8)
    with pytest.raises(InvalidRequest, match=message) as caught:
        decoder.forward(step(**changes), cache.pool)
    assert caught.value.field in ("token_ids", "positions", "seq_starts", "block_tables", "logit_rows")
    assert cache.pool.isnan().all()


def test_the_unchanged_step_is_accepted(decoder: NativeDecoder) -> None:
    pool = torch.zeros_like(Cache(decoder, blocks=8).pool)
    assert decoder.forward(step(), pool).shape == (2, 384)


@pytest.mark.parametrize(
    "change",
    [
        lambda pool: pool.to(torch.bfloat16),
        lambda pool: pool[:, :1],
        lambda pool: pool[:, :, :, :, :, ::2],
        lambda pool: pool.transpose(3, 4),
        lambda pool: pool[::2],
    ],
)
def test_a_wrong_pool_is_refused(decoder: NativeDecoder, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(InvalidRequest, match="pool: must be"):
        decoder.forward(step(), change(Cache(decoder, blocks=16).pool))


def test_only_the_blocks_of_new_positions_are_written(decoder: NativeDecoder) -> None:
    cache = Cache(decoder, blocks=8)
    stream = cache.stream(BLOCK_SIZE + 2)
    run(cache, [(stream, range(BLOCK_SIZE + 2))])
    written = ~cache.pool.isnan()
    assert written[stream.blocks[0]].all()
    assert written[stream.blocks[1], :, :, :, :2].all()
    assert written.sum() == (BLOCK_SIZE + 2) * written[0, :, :, :, 0].numel()


def test_an_empty_step_gives_no_logits(decoder: NativeDecoder) -> None:
    empty = PackedStep(ints(), ints(), ints(0), torch.empty(0, 1, dtype=torch.int32), ints())
    assert decoder.forward(empty, Cache(decoder, blocks=2).pool).shape == (0, 384)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("layers.1.down.weight", None, "weight layers.1.down.weight is missing"),
        ("final_norm.weight", torch.ones(3), r"weight final_norm.weight must have shape \[192\], got \[3\]"),
    ],
)
def test_missing_and_misshapen_weights_are_named(name: str, tensor: torch.Tensor | None, message: str) -> None:
    weights = dict(weights_of(NAME, torch.float32))
    weights.pop(name)
    if tensor is not None:
        weights[name] = tensor
    with pytest.raises(ModelError, match=message):
        NativeDecoder(spec_of(NAME), weights, torch.float32)


def test_unsupported_models_are_left_to_other_backends() -> None:
    with pytest.raises(NativeUnavailable, match="dtype must be float32 or bfloat16"):
        NativeDecoder(spec_of(NAME), weights_of(NAME, torch.float32), torch.float16)
    odd = dataclasses.replace(spec_of(NAME), head_dim=24)
    with pytest.raises(NativeUnavailable, match="head_dim must be a multiple of 32, got 24"):
        NativeDecoder(odd, weights_of(NAME, torch.float32), torch.float32)


def test_without_a_compiler_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_module, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler, looked for no-such-compiler"):
        build(tmp_path)


def test_a_failing_compiler_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="failed"):
        build(tmp_path, machine="no-such-machine")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(NativeUnavailable, match="cannot load"):
        NativeDecoder(spec_of(NAME), weights_of(NAME, torch.float32), torch.float32, 2, broken)


def test_a_decoder_that_goes_away_ends_its_threads() -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    weights = weights_of(NAME, torch.float32)
    run_once(NativeDecoder(spec_of(NAME), weights, torch.float32, 1))  # torch's own threads have started by now
    before = threads()
    decoder = NativeDecoder(spec_of(NAME), weights, torch.float32, 5)
    run_once(decoder)
    assert threads() == before + 4 + 3  # the whole team, and the one that leaves a core free
    del decoder
    gc.collect()
    deadline = time.monotonic() + 30
    while threads() != before:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def run_once(decoder: NativeDecoder) -> None:
    cache = Cache(decoder, blocks=4)
    run(cache, [(cache.stream(1), [1])])
