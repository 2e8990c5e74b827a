"""What every ``Decoder`` promises: the reference's tokens, and float32 logits that other sequences do not touch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.decoder import Decoder, Weights
from baton.engine.native.decoder import NativeDecoder
from baton.engine.spec import DecoderSpec
from baton.engine.torch_decoder import TorchDecoder
from baton.engine.weights.load import load_weights
from baton.engine.weights.source import load_spec
from tests.goldens import SMOLLM2_FEW
from tests.unit.engine.native.steps import Cache, Stream, chunked, greedy, run, step_of

DATA = Path(__file__).parents[1] / "data"
TINY = sorted(path.name for path in (DATA / "tiny").iterdir())
DECODERS: dict[str, Callable[[DecoderSpec, Weights, torch.dtype], Decoder]] = {
    "torch": TorchDecoder,
    "native": NativeDecoder,
}
SIZES = (1, 2, 3, 15, 16, 17, 31, 33, 48, 64)  # of batches, where each one would take long

pytestmark = pytest.mark.parametrize("kind", DECODERS)


@cache
def tiny(kind: str, name: str) -> Decoder:
    spec = load_spec(DATA / "tiny" / name)
    return DECODERS[kind](spec, load_weights(DATA / "tiny" / name, spec, torch.float32), torch.float32)


def cases(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompts(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(384) for _ in range(draw.choice((1, 2, 15, 16, 17, 63, 65, 90)))] for _ in range(count)]


def last_tokens(streams: list[Stream], texts: list[list[int]]) -> list[tuple[Stream, list[int]]]:
    """Work that computes the last token of each text again, over the keys that its stream already holds."""
    return [(Stream(stream.blocks, len(text) - 1), text[-1:]) for stream, text in zip(streams, texts, strict=True)]


@pytest.mark.parametrize("name", TINY)
def test_continues_every_tiny_model_as_the_reference_does(kind: str, name: str) -> None:
    memory = Cache(tiny(kind, name))
    for case in cases(DATA / "tiny" / name / "golden.jsonl"):
        tokens, logits = greedy(memory, case["prompt_token_ids"], case["max_tokens"])
        assert tokens == case["output_token_ids"], case["id"]
        for token, expected in case["first_step_top10"]:
            assert float(logits[token]) == pytest.approx(expected, abs=1e-3), case["id"]


@pytest.mark.parametrize("name", TINY)
def test_logits_of_a_row_are_the_same_bits_alone_and_in_any_batch(kind: str, name: str) -> None:
    decoder = tiny(kind, name)
    texts = prompts(64, seed=5)
    memory = Cache(decoder, blocks=600)
    streams = [memory.stream(len(text)) for text in texts]
    alone = torch.stack([run(memory, [(stream, text)])[0] for stream, text in zip(streams, texts, strict=True)])
    for size in range(1, 65) if kind == "native" else SIZES:
        again = last_tokens(streams, texts)[:size]
        assert torch.equal(run(memory, again), alone[:size]), f"batch of {size}"
    mixed = [(memory.stream(len(text)), text) for text in texts]
    assert torch.equal(run(memory, mixed), alone), "whole prompts side by side"


@pytest.mark.parametrize("name", TINY)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_logits_are_the_same_bits_for_any_chunking(kind: str, name: str, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 140), label="length")
    sizes = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=6), label="sizes")
    tokens = random.Random(length).choices(range(384), k=length)
    decoder = tiny(kind, name)
    assert torch.equal(chunked(Cache(decoder), tokens, sizes), chunked(Cache(decoder), tokens, [length]))


def test_a_chunk_beside_decoding_sequences_changes_no_bit(kind: str) -> None:
    decoder = tiny(kind, "mistral-window")
    long, short = random.Random(1).choices(range(384), k=120), random.Random(2).choices(range(384), k=20)
    memory = Cache(decoder)
    one, other = memory.stream(120), memory.stream(20)
    run(memory, [(one, long[:50]), (other, short[:19])])
    together = run(memory, [(one, long[50:]), (other, short[19:])])
    alone = [chunked(Cache(decoder), tokens, [len(tokens)])[-1] for tokens in (long, short)]
    assert torch.equal(together, torch.stack(alone))


def test_no_rows_wanted_gives_no_logits_but_stores_the_keys(kind: str) -> None:
    decoder = tiny(kind, "qwen3")
    tokens = list(range(1, 40))
    memory = Cache(decoder)
    stream = memory.stream(len(tokens))
    assert run(memory, [(stream, tokens[:-1])], logit_rows=[]).shape == (0, decoder.spec.vocab_size)
    assert torch.equal(run(memory, [(stream, tokens[-1:])])[0], chunked(Cache(decoder), tokens, [39])[-1])


@pytest.mark.parametrize("sizes", [(39,), (17, 1), (1, 1, 1)], ids=["a chunk", "a chunk and a row", "rows"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_all_keys_are_stored_before_the_logits_are_computed(kind: str, name: str, sizes: tuple[int, ...]) -> None:
    decoder = tiny(kind, name)
    apart, together = Cache(decoder, blocks=16), Cache(decoder, blocks=16)
    logits: list[torch.Tensor] = []
    for memory in (apart, together):
        work = [(memory.stream(size), list(range(1 + index, 1 + index + size))) for index, size in enumerate(sizes)]
        step = step_of(work)
        if memory is together:
            logits.append(decoder.forward(step, memory.pool))
            continue
        finish = decoder.fill(step, memory.pool)
        stored = memory.pool.clone()
        logits.append(finish())
        assert torch.equal(stored.view(torch.int32), memory.pool.view(torch.int32))
    assert torch.equal(*logits)
    assert torch.equal(apart.pool.view(torch.int32), together.pool.view(torch.int32))


def test_a_step_that_is_not_finished_leaves_no_trace_in_the_next(kind: str) -> None:
    decoder = tiny(kind, "qwen3")
    memory = Cache(decoder)
    unfinished = decoder.fill(step_of([(memory.stream(39), list(range(1, 40)))]), memory.pool)
    tokens = list(range(40, 90))
    assert torch.equal(run(memory, [(memory.stream(50), tokens)])[0], chunked(Cache(decoder), tokens, [50])[-1])
    if kind == "native":  # which keeps what it has between the halves in one place
        with pytest.raises(AssertionError, match="another step was begun"):
            unfinished()


def test_bfloat16_stays_close_to_float32(kind: str) -> None:
    spec = load_spec("random:tiny-llama")
    narrow, wide = (
        DECODERS[kind](spec, load_weights("random:tiny-llama", spec, dtype), dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    tokens = random.Random(3).choices(range(384), k=70)
    exact, rounded = chunked(Cache(wide), tokens, [70]), chunked(Cache(narrow), tokens, [70])
    assert (rounded - exact).abs().mean() < 0.02 * exact.std()


def test_wide_layers_give_the_same_bits_in_any_batch(kind: str) -> None:
    """Rows wide enough that element-wise work is spread over threads, at the shape of the default model."""
    spec = replace(load_spec("random:smollm2-135m"), layers=2, vocab_size=8_192)
    decoder = DECODERS[kind](spec, load_weights("random:smollm2-135m", spec, torch.float32), torch.float32)
    texts = [random.Random(seed).choices(range(8_192), k=70 + seed) for seed in range(64)]
    memory = Cache(decoder, blocks=64 * 9)
    streams = [memory.stream(len(text)) for text in texts]
    alone = torch.stack([run(memory, [(stream, text)])[0] for stream, text in zip(streams, texts, strict=True)])
    for size in SIZES:
        again = last_tokens(streams, texts)[:size]
        assert torch.equal(run(memory, again), alone[:size]), f"batch of {size}"


def test_continues_smollm2_as_the_reference_does(kind: str, smollm2_directory: Path) -> None:
    """The first tokens of a few cases, side by side; by the promises above that is the same as one by one."""
    wanted = [case for case in cases(DATA / "smollm2-135m-instruct.jsonl") if case["id"] in SMOLLM2_FEW]
    assert len(wanted) == len(SMOLLM2_FEW)
    check_goldens(kind, smollm2_directory, [shortened(case) for case in wanted])


def shortened(case: dict) -> dict:
    return case | {"max_tokens": min(8, case["max_tokens"]), "output_token_ids": case["output_token_ids"][:8]}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_continues_every_smollm2_case_as_the_reference_does(kind: str, smollm2_directory: Path) -> None:
    check_goldens(kind, smollm2_directory, cases(DATA / "smollm2-135m-instruct.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_continues_qwen_coder_as_the_reference_does(kind: str, qwen_coder_directory: Path) -> None:
    check_goldens(kind, qwen_coder_directory, cases(DATA / "qwen2.5-coder-0.5b-instruct.jsonl"))


def check_goldens(kind: str, directory: Path, wanted: list[dict]) -> None:
    spec = load_spec(directory)
    decoder = DECODERS[kind](spec, load_weights(directory, spec, torch.float32), torch.float32)
    memory = Cache(decoder, blocks=sum((case["prompt_tokens"] + case["max_tokens"]) // 16 + 1 for case in wanted))
    tokens, logprobs = side_by_side(memory, wanted)
    for case in wanted:
        assert tokens[case["id"]] == case["output_token_ids"], case["id"]
        for found, expected in zip(logprobs[case["id"]], case.get("logprobs", ()), strict=False):
            for token, logprob in [(expected["token_id"], expected["logprob"]), *expected["top5"]]:
                assert float(found[token]) == pytest.approx(logprob, abs=1e-3), case["id"]


def side_by_side(memory: Cache, wanted: list[dict]) -> tuple[dict[str, list[int]], dict[str, list[torch.Tensor]]]:
    """Greedy tokens of each case until EOS or its limit, and the log-probabilities of each step where asked for."""
    ends = memory.decoder.spec.eos_token_ids
    running = {case["id"]: (case, memory.stream(case["prompt_tokens"] + case["max_tokens"])) for case in wanted}
    last = {case["id"]: case["prompt_token_ids"] for case in wanted}
    tokens: dict[str, list[int]] = {name: [] for name in running}
    logprobs: dict[str, list[torch.Tensor]] = {name: [] for name in running}
    while running:
        logits = run(memory, [(stream, last[name]) for name, (_, stream) in running.items()])
        for row, (name, (case, _)) in zip(logits, list(running.items()), strict=True):
            tokens[name].append(int(row.argmax()))
            last[name] = tokens[name][-1:]
            if "logprobs" in case:
                logprobs[name].append(torch.log_softmax(row, dim=-1))
            if tokens[name][-1] in ends or len(tokens[name]) == case["max_tokens"]:
                del running[name]
    return tokens, logprobs
