from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.models.registry import by_name
from baton.engine.spec import DecoderSpec
from baton.engine.weights.source import load_spec, preset_names
from bench.roofline import H200, Lengths, ModelWork, Peak, Piece, Work

LLAMA = load_spec("random:llama-3-8b")
TINY = load_spec("random:tiny-llama")
BFLOAT16 = 2


def work_of(spec: DecoderSpec) -> ModelWork:
    return ModelWork(spec, BFLOAT16, spec.kv_bytes_per_token(BFLOAT16))


def least_seconds(work: Work) -> float:
    return sum(piece.seconds(H200) for piece in work.pieces)


@pytest.mark.parametrize("preset", preset_names())
def test_every_linear_weight_counts_once(preset: str) -> None:
    spec = load_spec(f"random:{preset}")
    sizes = {layout.name: math.prod(layout.shape) for layout in by_name(spec.architecture).tensors(spec)}
    linear = {name: size for name, size in sizes.items() if "norm" not in name and name != "embed.weight"}
    if spec.tied_head:
        linear["head.weight"] = sizes["embed.weight"]
    every_expert_is_used = work_of(spec).decode_step(100_000, 1.0).pieces[0]
    assert every_expert_is_used.bytes == pytest.approx(BFLOAT16 * sum(linear.values()), rel=1e-6)
    share = 1.0 if spec.moe is None else spec.moe.top_k / spec.moe.experts
    used = sum(size * (share if ".experts." in name else 1) for name, size in linear.items())
    assert work_of(spec).decode_step(1, 1.0).pieces[0].flops == pytest.approx(2 * used)


@pytest.mark.parametrize(("rows", "milliseconds"), [(1, 3.5), (64, 5.6), (256, 13.5)])
def test_the_least_decode_step_of_an_8b_model_on_an_h200(rows: int, milliseconds: float) -> None:
    """The limits that were worked out by hand for contexts of 1088 tokens."""
    work = work_of(LLAMA).decode_step(rows, 1088)
    assert 1000 * least_seconds(work) == pytest.approx(milliseconds, rel=0.02)


@pytest.mark.parametrize(("requests", "tokens", "rate"), [(64, 1024, 55_500), (16, 8192, 49_000), (8, 16384, 43_000)])
def test_the_fastest_prefill_of_an_8b_model_on_an_h200(requests: int, tokens: int, rate: float) -> None:
    work = work_of(LLAMA).requests([Lengths(tokens, 1)] * requests, requests * tokens // 8192)
    assert requests * tokens / least_seconds(work) == pytest.approx(rate, rel=0.03)


@given(st.integers(1, 40), st.integers(1, 40), st.none() | st.integers(1, 50))
def test_attention_counts_every_pair_of_positions_once(prompt: int, output: int, window: int | None) -> None:
    spec = replace(TINY, sliding_window=window)
    seen = [min(position + 1, window or position + 1) for position in range(prompt + output - 1)]
    _, prefill, decode = work_of(spec).requests([Lengths(prompt, output)], steps=output).pieces
    flops_per_pair = 4 * spec.layers * spec.q_size
    assert prefill.flops == flops_per_pair * sum(seen[:prompt])
    assert decode.flops == flops_per_pair * sum(seen[prompt:])
    assert decode.bytes == work_of(spec).kv_bytes * sum(seen[prompt:])


def test_the_steps_of_whole_requests_are_those_of_decode() -> None:
    """One request's answer costs what its decode steps cost one by one."""
    model = work_of(TINY)
    whole = model.requests([Lengths(10, 5)], steps=5)
    prompt = model.requests([Lengths(10, 1)], steps=1)
    steps = [model.decode_step(1, context) for context in range(11, 15)]
    for measure in ("flops", "bytes"):
        total = sum(getattr(piece, measure) for piece in whole.pieces)
        parts = sum(getattr(piece, measure) for work in (prompt, *steps) for piece in work.pieces)
        assert total == pytest.approx(parts)


def test_few_rows_read_few_experts() -> None:
    mixture = work_of(load_spec("random:qwen3-30b-a3b"))
    one, many = (mixture.decode_step(rows, 1.0).pieces[0].bytes for rows in (1, 1000))
    assert many > 8 * one


def test_the_fractions_are_of_the_given_peak() -> None:
    peak = Peak(bytes_per_second=10.0, flops_per_second=100.0)
    work = Work((Piece(flops=100.0, bytes=5.0), Piece(flops=20.0, bytes=10.0)))  # at least 1 s each
    assert work.fractions(4.0, peak) == {"mfu": 0.3, "mbu": 0.375, "roofline": 0.5}
