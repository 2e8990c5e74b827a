"""The GPU's runner alone, without core, process or wire: what a step costs the device and what it costs the host.

``python -m bench.cuda_runner [--model random:llama-3-8b] [--context 1024] [--set engine.K=V]`` prints a table. Its line
on windows says what it costs that rows with an attention window and rows without share a step: the time of a batch of
which every other row has one, beyond the mean of those of the batches where none has and where all have.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch

from baton.core.config import Section, Settings
from baton.core.types import Module, Sampling
from baton.engine.config import EngineConfig, device_defaults
from baton.engine.cuda.runner import CudaRunner
from baton.engine.load import build_runner
from baton.engine.runner import Draw, Part

BATCHES = (1, 2, 4, 8, 12, 16, 20, 32, 64, 128, 256)  # 12 and 20 are padded
STEPS = 64
WARM_STEPS = 8
PROMPT = 2048  # whose time to first token is measured
REPEATS = 10
WINDOWED_BATCH, WINDOWED_CONTEXT, WINDOW = 64, 4096, 1024


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over the steps of one batch size."""

    step_ms: float  # from one step's results to the next one's
    launch_us: float  # of the host, while the device computes the step before
    collect_us: float  # of the host after the results have arrived


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cuda_runner")
    parser.add_argument("--model", default="random:llama-3-8b")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence before the measured steps")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="engine.KEY=VALUE")
    options = parser.parse_args()
    started = time.perf_counter()
    with opened(options.model, options.settings) as (runner, config):
        print(f"{options.model}: ready in {time.perf_counter() - started:.1f} s, {runner.total_blocks} blocks")
        for batch in (size for size in BATCHES if size <= min(config.max_running, config.max_step_tokens)):
            found = decode(runner, batch, options.context)
            print(
                f"decode B{batch}: step {found.step_ms:.3f} ms, host launch {found.launch_us:.0f} us, "
                f"collect {found.collect_us:.0f} us"
            )
        if Module.ATTENTION_WINDOW in runner.card.modules:
            print(windows(runner, config))
        print(f"prefill of {config.max_step_tokens}: {prefill(runner, config):.0f} tok/s")
        print(f"first token of {PROMPT}: {first_token(runner, config) * 1e3:.2f} ms")
        print(f"device memory in use: {torch.cuda.memory_reserved() / 1e9:.1f} GB by torch")


@contextmanager
def opened(model: str, settings: Sequence[str]) -> Iterator[tuple[CudaRunner, EngineConfig]]:
    """The runner of a model on the GPU, and its configuration; ``settings`` are of the form ``engine.KEY=VALUE``."""
    flags = ["engine.device=cuda", f"engine.model={model}", *settings]
    config = Settings.read(file=None, environ={}, flags=flags).fill(Section("engine", EngineConfig, device_defaults))
    runner = cast(CudaRunner, build_runner(config))
    try:
        yield runner, config
    finally:
        runner.close()


def sequences(runner: CudaRunner, lengths: Sequence[int], room: int) -> list[Part]:
    """Parts that compute nothing yet: random contexts, each with its own blocks for ``room`` more tokens."""
    size = runner.card.format.block_size
    made: list[Part] = []
    next_block = 0
    for key, length in enumerate(lengths):
        count = -(-(length + room) // size)
        tokens = torch.randint(runner.card.vocab_size, (length,)).tolist()
        blocks = [block % runner.total_blocks for block in range(next_block, next_block + count)]
        made.append(Part(key, tokens, 0, 0, blocks, Draw(Sampling(), length)))
        next_block += count
    return made


def windows(runner: CudaRunner, config: EngineConfig) -> str:
    """Steps of one batch without windows, with one on every other row and on all."""
    batch = min(WINDOWED_BATCH, config.max_running, config.max_step_tokens)
    context = min(WINDOWED_CONTEXT, runner.card.context_length - STEPS - WARM_STEPS - 2)
    none, half, every = (decode(runner, batch, context, seen).step_ms for seen in ((None,), (None, WINDOW), (WINDOW,)))
    tax = half / ((none + every) / 2) - 1
    return (
        f"decode B{batch} x {context}: step {none:.3f} ms without windows, {every:.3f} ms with windows of {WINDOW}, "
        f"{half:.3f} ms half and half, {tax:+.1%} for mixing them"
    )


def decode(runner: CudaRunner, batch: int, context: int, seen: Sequence[int | None] = (None,)) -> Figures:
    """Steady decoding one step ahead; ``seen`` are the rows' windows, in turn.

    What stands in the blocks does not matter to the time: nothing is prefilled.
    """
    parts = [
        part._replace(window=seen[index % len(seen)])
        for index, part in enumerate(sequences(runner, [context] * batch, STEPS + WARM_STEPS + 2))
    ]
    arrivals: list[float] = []
    launches: list[float] = []
    collects: list[float] = []
    steps = STEPS + WARM_STEPS
    runner.launch([part._replace(start=context - 1, end=context) for part in parts])
    for index in range(steps):
        made = [part._replace(start=context + index, end=context + index + 1) for part in parts]
        before = time.perf_counter()
        if index + 1 < steps:
            runner.launch(made)
        launched = time.perf_counter()
        runner._flights[0].slot.wait()  # noqa: SLF001 - so that waiting does not count as the host's work
        arrivals.append(time.perf_counter())
        runner.collect()
        collects.append(time.perf_counter() - arrivals[-1])
        launches.append(launched - before)
    for part in parts:
        runner.forget(part.key)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)][WARM_STEPS:]
    return Figures(
        statistics.median(gaps) * 1e3,
        statistics.median(launches[WARM_STEPS:-1]) * 1e6,
        statistics.median(collects[WARM_STEPS:]) * 1e6,
    )


def prefill(runner: CudaRunner, config: EngineConfig) -> float:
    """Tokens a second in full steps of one chunk each, launched one ahead."""
    length = min(config.max_step_tokens, runner.card.context_length - 1)  # one more is drawn
    started = 0.0
    for index in range(REPEATS + 1):
        part = sequences(runner, [length], 1)[0]
        runner.launch([part._replace(key=index, end=length)])
        if index:
            runner.collect()
        if index == 1:
            started = time.perf_counter()
    runner.collect()
    seconds = time.perf_counter() - started
    for index in range(REPEATS + 1):
        runner.forget(index)
    return length * REPEATS / seconds


def first_token(runner: CudaRunner, config: EngineConfig) -> float:
    """Seconds from launch to token of a prompt in as many steps as its length takes; the median."""
    length = min(PROMPT, config.max_step_tokens, runner.card.context_length - 1)
    times: list[float] = []
    for index in range(REPEATS):
        part = sequences(runner, [length], 1)[0]._replace(key=index, end=length)
        started = time.perf_counter()
        runner.launch([part])
        runner.collect()
        times.append(time.perf_counter() - started)
        runner.forget(index)
    return statistics.median(times)


if __name__ == "__main__":
    main()
