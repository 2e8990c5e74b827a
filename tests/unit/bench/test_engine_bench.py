from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from baton.core.clock import ManualClock, SystemClock
from baton.core.errors import ConfigError, InvalidRequest
from baton.core.types import EngineStats
from baton.engine.client import EngineClient, threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.load import build_runner
from baton.engine.runner import Part
from baton.engine.weights.source import load_spec
from bench.engine_bench import EngineBench, Roofline, SteadyState
from bench.engine_watch import EngineWatch, step_figures
from bench.prompts import RandomPrompts
from bench.roofline import ModelWork, Peak
from bench.shapes import DecodeStep, parse_shapes

ROOFLINE = Roofline(ModelWork(load_spec("random:tiny-llama"), 2, 16), Peak(1e9, 1e12))


class SamePrompt(RandomPrompts):
    """Gives every request the prompt of the first one."""

    def ids(self, length: int) -> tuple[int, ...]:
        return (7,) * length


@asynccontextmanager
async def bench(
    prompts: RandomPrompts | None = None, *, max_running: int = 16, sizes: list[int] | None = None
) -> AsyncIterator[tuple[EngineBench, EngineClient]]:
    """A bench on a fake engine. ``sizes`` receives the parts of each step."""

    def on_step(parts: Sequence[Part]) -> None:
        if sizes is not None:
            sizes.append(len(parts))

    config = EngineConfig(max_running=max_running, max_step_tokens=64)
    runner = FakeRunner(fake_card(context_length=4096), 2048, on_step=on_step)
    async with threaded_engine(runner, config) as engine:
        drawn = prompts or RandomPrompts(engine.card.vocab_size, seed=1)
        yield EngineBench(engine, drawn, SystemClock(), roofline=ROOFLINE), engine


async def measure(spelling: str, max_running: int = 16) -> tuple[dict[str, float], EngineStats]:
    (shape,) = parse_shapes(spelling)
    async with bench(max_running=max_running) as (measured, engine):
        figures = await measured.measure(shape)
        await measured.warm_up()  # waits until the engine is idle
        return figures, engine.stats


def test_a_batch_counts_every_token_of_every_request() -> None:
    figures, stats = asyncio.run(measure("batch:6x20-40/2-9"))
    assert 6 * 20 <= figures["prompt_tokens"] <= 6 * 40
    assert 6 * 2 <= figures["output_tokens"] <= 6 * 9
    assert stats.tokens_generated == figures["output_tokens"] + 4 * 8  # the warm-up's are not in it
    for counted in ("prompt", "output"):
        rate = figures[f"{counted}_tokens_per_second"]
        assert rate == pytest.approx(figures[f"{counted}_tokens"] / figures["seconds"])
    total = figures["prompt_tokens_per_second"] + figures["output_tokens_per_second"]
    assert figures["total_tokens_per_second"] == pytest.approx(total)
    assert 0 < max(figures["mfu"], figures["mbu"]) <= figures["roofline"]


class NoWatch(EngineWatch):
    """Counts nothing but the seconds since its last start."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.start()

    def start(self) -> None:
        self._started = self._clock.now()

    def figures(self) -> dict[str, float]:
        return {"seconds": self._clock.now() - self._started}


def test_a_decode_step_is_measured_while_all_requests_decode() -> None:
    """A first stream has steps of 1 s to itself; with the second one, steps take 0.25 s."""
    clock = ManualClock()
    steady = SteadyState(DecodeStep("", 2, prompt=100, output=40), NoWatch(clock), clock)
    for _ in range(5):
        clock.advance(1.0)
        steady.add(0, 1)
    while not steady.closed.is_set():
        clock.advance(0.25)
        steady.add(1, 1)
        steady.add(0, 1)
    figures = steady.figures()
    assert (figures["step_ms"], figures["mean_step_ms"]) == (250, 250)
    assert figures["seconds"] == 0.25 * 34  # the first stream's 6th token comes in the first step, its 40th ends it
    assert figures["output_tokens_per_second"] == pytest.approx(2 / 0.25, rel=0.05)
    assert figures["mean_context"] == pytest.approx(100 + ((5 + 40) / 2 + (1 + 35) / 2) / 2)


def test_there_is_no_stretch_when_a_stream_ends_before_the_last_one_begins() -> None:
    clock = ManualClock()
    steady = SteadyState(DecodeStep("", 2, prompt=100, output=4), NoWatch(clock), clock)
    steady.add(0, 4)
    steady.end()
    for _ in range(100):
        clock.advance(1.0)
        steady.add(1, 1)
    assert not steady.closed.is_set()


def test_a_step_with_several_tokens_is_one_step() -> None:
    clock = ManualClock()
    steady = SteadyState(DecodeStep("", 1, prompt=8, output=40), NoWatch(clock), clock)
    while not steady.closed.is_set():
        clock.advance(0.5)
        steady.add(0, 3)
    figures = steady.figures()
    assert figures["step_ms"] == 500
    assert figures["output_tokens_per_second"] == 6.0


def test_answers_go_on_where_prompts_leave_too_few_steps() -> None:
    """200 prompt tokens take four steps each, so the first request has its two tokens before the last one begins."""
    sizes: list[int] = []

    async def main() -> tuple[dict[str, float], EngineStats]:
        async with bench(sizes=sizes) as (measured, engine):
            figures = await measured.measure(parse_shapes("decode:4x200/2")[0])
            await measured.warm_up()  # waits until the engine is idle
            return figures, engine.stats

    figures, stats = asyncio.run(main())
    assert 1 in sizes
    assert figures["gaps"] >= DecodeStep.MIN_STEPS - 1
    assert figures["step_ms"] >= 0
    assert figures["mean_context"] > 200
    assert (stats.running, stats.waiting, stats.held_blocks) == (0, 0, 0)


def test_an_engine_that_cannot_decode_all_at_once_is_no_measurement() -> None:
    with pytest.raises(ConfigError, match="decode:4x16/8: the engine must decode all 4 at once"):
        asyncio.run(measure("decode:4x16/8", max_running=3))


def test_first_tokens_are_measured_one_request_after_the_other() -> None:
    sizes: list[int] = []
    (shape,) = parse_shapes("ttft:30")

    async def main() -> dict[str, float]:
        async with bench(sizes=sizes) as (measured, _):
            return await measured.measure(shape)

    figures = asyncio.run(main())
    assert sizes == [1] * 10
    assert figures["ttft_min_ms"] <= figures["ttft_ms"] <= figures["ttft_max_ms"]


def test_a_prefix_hit_is_no_measurement() -> None:
    async def main() -> None:
        async with bench(SamePrompt(512, 1)) as (measured, _):
            await measured.measure(parse_shapes("ttft:64")[0])

    with pytest.raises(RuntimeError, match="tokens were cached, expected 0"):
        asyncio.run(main())


def test_no_prompt_comes_twice_over_repeats() -> None:
    async def main() -> int:
        async with bench() as (measured, engine):
            for _ in range(3):
                await measured.measure(parse_shapes("batch:4x32/2")[0])
            return engine.stats.prompt_tokens_cached

    assert asyncio.run(main()) == 0


def test_what_never_fits_the_engine_is_its_error() -> None:
    with pytest.raises(InvalidRequest, match="at most 4096"):
        asyncio.run(measure("batch:2x5000/2"))


def test_answers_that_repeat_themselves_are_the_same_with_drafts() -> None:
    config = EngineConfig("random:tiny-llama", dtype="float32", kv_blocks=128, threads=1, speculation="ngram")

    async def main() -> dict[str, float]:
        async with threaded_engine(build_runner(config), config) as engine:
            prompts = RandomPrompts(engine.card.vocab_size, seed=1)
            return await EngineBench(engine, prompts, SystemClock()).measure(parse_shapes("repeat:2x40/100")[0])

    figures = asyncio.run(main())
    assert figures["same_tokens"] == 1.0
    assert figures["draft_acceptance"] > 0.5
    assert figures["tokens_per_step"] > 3
    assert figures["speedup"] == pytest.approx(figures["plain_tpot_ms"] / figures["tpot_ms"])


def test_an_engine_that_does_not_speculate_cannot_show_what_drafts_bring() -> None:
    with pytest.raises(ConfigError, match=r"repeat:1x9/9: the engine must speculate, set engine\.speculation"):
        asyncio.run(measure("repeat:1x9/9"))


def test_times_by_the_step_are_shown_where_an_engine_has_them() -> None:
    before, after = (
        EngineStats(steps=10, host_seconds=1.0),
        EngineStats(steps=30, preemptions=2, host_seconds=1.02, device_seconds=0.19, device_idle_seconds=0.01),
    )
    assert step_figures(before, after) == pytest.approx(
        {"steps": 20, "preemptions": 2, "host_ms_per_step": 1.0, "device_ms_per_step": 9.5, "device_idle_share": 0.05}
    )
    assert step_figures(EngineStats(), EngineStats(steps=5)) == {"steps": 5, "preemptions": 0}
    assert step_figures(after, after) == {"steps": 0, "preemptions": 0}
