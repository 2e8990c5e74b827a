"""A row's logits are the same bits alone, in any batch, for any chunking, block placement and number of threads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.native.decoder import NativeDecoder
from tests.unit.engine.native.steps import Cache, Stream, chunked, run
from tests.unit.engine.native.tiny_models import MODELS, cases_of, spec_of, weights_of

DTYPES = [torch.float32, torch.bfloat16]


def decoder(name: str, dtype: torch.dtype = torch.float32, threads: int = 2) -> NativeDecoder:
    return NativeDecoder(spec_of(name), weights_of(name, dtype), dtype, threads)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 384, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_any_chunking_of_a_prompt_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    cache = Cache(decoder(name, dtype))
    prompt = cases_of(name)[3].prompt[:170]
    one_by_one = chunked(cache, prompt, [1])
    for sizes in ([170], [7], [64], [1, 100, 3], [33, 2, 50]):
        assert same_bits(chunked(cache, prompt, sizes), one_by_one), sizes


def prefilled(cache: Cache, prompts: Sequence[Sequence[int]]) -> list[Stream]:
    """A stream per prompt with all but its last token in the cache."""
    streams = [cache.stream(len(prompt)) for prompt in prompts]
    for stream, prompt in zip(streams, prompts, strict=True):
        if len(prompt) > 1:
            run(cache, [(stream, prompt[:-1])])
    return streams


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_same_bits_alone_and_in_batches_up_to_64(name: str, dtype: torch.dtype) -> None:
    cache = Cache(decoder(name, dtype), blocks=512)
    prompts = [tokens(1 + 3 * index % 71, seed=index) for index in range(64)]
    streams = prefilled(cache, prompts)
    cached = [stream.cached for stream in streams]
    alone = torch.cat([run(cache, [(stream, prompt[-1:])]) for stream, prompt in zip(streams, prompts, strict=True)])
    for rows in range(2, 65):
        for stream, count in zip(streams, cached, strict=True):
            stream.cached = count
        batch = run(cache, [(streams[i], prompts[i][-1:]) for i in range(rows)])
        assert same_bits(batch, alone[:rows]), rows


@pytest.mark.parametrize("name", ["llama-gqa-untied", "mistral-window", "qwen3-moe"])
def test_decoding_rows_keep_their_bits_beside_a_long_prefill(name: str) -> None:
    cache = Cache(decoder(name), blocks=512)
    prompts = [tokens(40 + index, seed=index) for index in range(5)]
    streams = prefilled(cache, prompts)
    alone = torch.cat([run(cache, [(stream, prompt[-1:])]) for stream, prompt in zip(streams, prompts, strict=True)])
    long = tokens(260, seed=99)
    expected = run(cache, [(cache.stream(260), long)])
    for stream in streams:
        stream.cached -= 1
    work = [(stream, prompt[-1:]) for stream, prompt in zip(streams, prompts, strict=True)]
    mixed = run(cache, [*work[:2], (cache.stream(260), long), *work[2:]])
    assert same_bits(mixed, torch.cat([alone[:2], expected, alone[2:]]))


@pytest.mark.parametrize("threads", [1, 3, 4])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    prompt = tokens(150)
    reference = chunked(Cache(decoder("qwen2")), prompt, [150, 1])
    assert same_bits(chunked(Cache(decoder("qwen2", threads=threads)), prompt, [90, 1]), reference)


def test_rows_without_wanted_logits_do_not_change_the_others() -> None:
    cache = Cache(decoder("llama-gqa-tied"))
    prompt = tokens(100)
    everything = run(cache, [(cache.stream(100), prompt)], range(100))
    some = [0, 7, 50, 98]
    assert same_bits(run(cache, [(cache.stream(100), prompt)], some), everything[some])


def test_a_step_that_wants_no_logits_fills_the_cache() -> None:
    cache = Cache(decoder("llama-gqa-tied"))
    prompt = tokens(50)
    expected = run(cache, [(cache.stream(50), prompt)])
    stream = cache.stream(50)
    assert run(cache, [(stream, prompt[:-1])], []).shape == (0, 384)
    assert same_bits(run(cache, [(stream, prompt[-1:])]), expected)


@pytest.fixture(scope="module")
def windowed() -> Cache:
    return Cache(decoder("mistral-window"), blocks=256)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_mixes_of_chunks_give_the_bits_of_whole_prompts(windowed: Cache, data: st.DataObject) -> None:
    """Streams advance by random amounts in shared steps until all prompts are in."""
    cache = windowed
    cache.free = [block for start in (1, 0) for block in range(start, cache.blocks, 2)]
    prompts = [tokens(data.draw(st.integers(1, 120)), seed) for seed in range(data.draw(st.integers(1, 6)))]
    whole = torch.cat([run(cache, [(cache.stream(len(prompt)), prompt)]) for prompt in prompts])
    streams = [cache.stream(len(prompt)) for prompt in prompts]
    last: dict[int, torch.Tensor] = {}
    while len(last) < len(prompts):
        work = [
            (i, prompts[i][stream.cached :][: data.draw(st.integers(1, 64))])
            for i, stream in enumerate(streams)
            if stream.cached < len(prompts[i])
        ]
        logits = run(cache, [(streams[i], chunk) for i, chunk in work])
        last |= {i: logits[at] for at, (i, _) in enumerate(work) if streams[i].cached == len(prompts[i])}
    assert same_bits(torch.stack([last[i] for i in range(len(prompts))]), whole)
