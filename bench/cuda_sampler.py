"""Times the device sampler: ``python -m bench.cuda_sampler``.

Each figure is the median over replays of a CUDA graph of launches on alternating logits, in microseconds a launch; so
the launch itself is hidden, as it is behind a decode graph. ``read`` is the time to read the logits once at the
bandwidth of a device copy. Logits are those of a model with random weights (nearly flat, the worst case for top_p) and
peaked ones like a trained model's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from baton.core.types import Sampling
from baton.engine.cuda.build import build
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.sampler import DeviceSampler
from baton.engine.runner import Draw
from bench.captured import median_time

VOCABS = {"Llama-3-8B": 128_256, "Qwen3-0.6B": 151_936}
ROWS = (1, 64, 256)
SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8),
    "top_p": Sampling(temperature=0.8, top_p=0.95),
    "top_p+top_k": Sampling(temperature=0.8, top_p=0.95, top_k=50),
    "min_p": Sampling(temperature=0.8, min_p=0.05),
    "penalties": Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2),
}
SHARPNESS = {"flat": 1.0, "peaked": 3.0}  # standard deviation of the logits
CONTEXT = 1000  # tokens, for the penalties
LAUNCHES = 8  # in a graph
COPY_RATE = 4.26e12  # bytes a second, read and written


@dataclass(frozen=True)
class Timing:
    model: str
    rows: int
    logits: str
    sampling: str
    microseconds: float
    read_microseconds: float


class Subject:
    """A sampler with its outputs, and two sets of logits that take turns."""

    def __init__(self, library: CudaLibrary, vocab: int, rows: int) -> None:
        device = torch.device("cuda")
        self._sampler = DeviceSampler(library, vocab, rows, device)
        self._positions = torch.full((rows,), CONTEXT - 1, dtype=torch.int32, device=device)
        self._tokens, self._flags = torch.zeros_like(self._positions), torch.zeros_like(self._positions)
        self._noise = [torch.randn(rows, vocab, device=device) for _ in range(2)]
        self._logits: list[torch.Tensor] = []

    def set_logits(self, scale: float) -> None:
        self._logits = [(noise * scale).to(torch.bfloat16) for noise in self._noise]

    def microseconds(self, rows: int, sampling: Sampling) -> float:
        """Of one launch that draws ``rows`` rows."""
        context = [(i * 7919) % 32_000 for i in range(CONTEXT)]
        for row in range(rows):
            self._sampler.forget(row)
            self._sampler.set_row(row, row, Draw(replace(sampling, seed=row), CONTEXT // 2), context)
        self._sampler.upload()
        return median_time(
            lambda i: self._sampler.sample(self._logits[i % 2], self._positions, rows, self._tokens, self._flags),
            LAUNCHES,
        )


def bench_sampler(rows_counts: Sequence[int] = ROWS) -> list[Timing]:
    """Every sampling on every shape; some twenty seconds."""
    library = CudaLibrary(build())
    timings: list[Timing] = []
    for model, vocab in VOCABS.items():
        subject = Subject(library, vocab, max(rows_counts))
        for logits, scale in SHARPNESS.items():
            subject.set_logits(scale)
            for rows in rows_counts:
                read = rows * vocab * 2 / COPY_RATE * 1e6
                for name, sampling in SAMPLINGS.items():
                    time = subject.microseconds(rows, sampling)
                    timings.append(Timing(model, rows, logits, name, time, read))
    return timings


def print_table(timings: Sequence[Timing]) -> None:
    print(f"{'vocabulary of':14}{'rows':>5}{'logits':>8}  {'read':>6}" + "".join(f"{name:>13}" for name in SAMPLINGS))
    for index in range(0, len(timings), len(SAMPLINGS)):
        line = timings[index : index + len(SAMPLINGS)]
        first = line[0]
        head = f"{first.model:14}{first.rows:5}{first.logits:>8}  {first.read_microseconds:6.1f}"
        print(head + "".join(f"{timing.microseconds:13.1f}" for timing in line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of a step (default: %(default)s)")
    print_table(bench_sampler(parser.parse_args().rows))


if __name__ == "__main__":
    main()
