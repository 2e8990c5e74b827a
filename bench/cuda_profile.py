"""Where the time of a GPU step goes: microseconds by kernel, and how long the device stood idle between them.

``python -m bench.cuda_profile [--model random:llama-3-8b] [--batches 1,64,256] [--prompts 2048] [--mixed 12+500]``
prints one table a step shape. Kernels launched ahead of their predecessor's end count from their own start, so their
sum may exceed the step; ``busy`` is the time in which at least one of them ran.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile

from baton.engine.cuda.runner import CudaRunner
from bench.cuda_runner import opened, sequences

STEPS = 12
WARM_STEPS = 4
SHOWN = 16  # kernels a table
NAME = re.compile(r"(?:void )?(?:[a-zA-Z_0-9]+::)*([a-zA-Z_0-9]+)")


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel or copy on the device; microseconds."""

    name: str
    start: float
    end: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cuda_profile")
    parser.add_argument("--model", default="random:llama-3-8b")
    parser.add_argument("--batches", default="1,64,256", help="decode batches")
    parser.add_argument("--prompts", default="2048", help="lengths of prompts computed in one step; or none")
    parser.add_argument(
        "--mixed", default="none", help="ROWS+TOKENS,...: decode rows beside a chunk of a prompt; or none"
    )
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="engine.KEY=VALUE")
    options = parser.parse_args()
    with opened(options.model, options.settings) as (runner, _):
        for batch in map(int, options.batches.split(",")):
            report(f"decode B{batch} x {options.context}", recorded(decoding(runner, batch, options.context)), STEPS)
        for length in () if options.prompts == "none" else map(int, options.prompts.split(",")):
            report(f"prefill {length}", recorded(prefilling(runner, length)), STEPS)
        for shape in () if options.mixed == "none" else options.mixed.split(","):
            rows, tokens = map(int, shape.split("+"))
            report(f"{shape} x {options.context}", recorded(mixing(runner, rows, tokens, options.context)), STEPS)


def decoding(runner: CudaRunner, batch: int, context: int) -> Callable[[int], None]:
    """Steps of decode rows, launched one ahead; the argument says how many."""
    parts = sequences(runner, [context] * batch, 2 * STEPS + WARM_STEPS + 8)
    at = context

    def run(steps: int) -> None:
        nonlocal at
        for index in range(steps):
            runner.launch([part._replace(start=at - 1, end=at) for part in parts])
            at += 1
            if index:
                runner.collect()
        runner.collect()

    return run


def prefilling(runner: CudaRunner, length: int) -> Callable[[int], None]:
    """Steps of one whole prompt each, launched one ahead."""
    part = sequences(runner, [length], 1)[0]

    def run(steps: int) -> None:
        for index in range(steps):
            runner.launch([part._replace(key=1_000_000 + index, end=length)])
            if index:
                runner.collect()
        runner.collect()
        for index in range(steps):
            runner.forget(1_000_000 + index)

    return run


def mixing(runner: CudaRunner, rows: int, tokens: int, context: int) -> Callable[[int], None]:
    """Steps of decode rows and a chunk amid a prompt, launched one ahead."""
    room = 2 * STEPS + WARM_STEPS + 8
    *parts, prompt = sequences(runner, [*([context] * rows), context + tokens], room)
    chunk = prompt._replace(start=context, end=context + tokens, draw=None)
    at = context

    def run(steps: int) -> None:
        nonlocal at
        for index in range(steps):
            runner.launch([*(part._replace(start=at - 1, end=at) for part in parts), chunk])
            at += 1
            if index:
                runner.collect()
        runner.collect()

    return run


def recorded(run: Callable[[int], None]) -> list[Span]:
    run(WARM_STEPS)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(STEPS)
        torch.cuda.synchronize()
    events = cast("Iterable[Any]", profiler.events())
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if str(event.device_type).endswith("CUDA")
    ]
    return sorted(spans, key=lambda span: span.start)


def report(title: str, spans: list[Span], steps: int) -> None:
    if not spans:
        print(f"{title}: the profiler saw nothing")
        return
    begin, end = spans[0].start, max(span.end for span in spans)
    busy = covered(spans)
    print(
        f"{title}: {(end - begin) / steps:.0f} us a step, busy {busy / steps:.0f}, idle {1 - busy / (end - begin):.1%}"
    )
    seconds: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for span in spans:
        name = short(span.name)
        seconds[name] += span.end - span.start
        counts[name] += 1
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:SHOWN]:
        each = seconds[name] / counts[name]
        print(f"  {seconds[name] / steps:9.1f} us  {counts[name] / steps:6.1f} x {each:8.2f}  {name}")


def covered(spans: list[Span]) -> float:
    """Microseconds in which at least one span, in order of starts, was running."""
    total, end = 0.0, spans[0].start
    for span in spans:
        if span.end > end:
            total += span.end - max(span.start, end)
            end = span.end
    return total


def short(name: str) -> str:
    """A kernel's name without namespaces; template arguments only as far as they tell shapes apart."""
    name = name.replace("(anonymous namespace)::", "")
    match = NAME.match(name)
    plain = match.group(1) if match else name
    tail = re.sub(r"[^0-9a-z_]", "", name[match.end() if match else 0 :].lower())[:28]
    return f"{plain} {tail}".strip()


if __name__ == "__main__":
    main()
