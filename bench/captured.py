"""The time of short launches on the GPU: captured into a graph, so that the host's pace does not count."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

REPLAYS = 9


def median_time(launch: Callable[[int], None], launches: int) -> float:
    """Microseconds of one ``launch(i)``, i below ``launches``, of a graph of all of them; the first replay warms up."""
    launch(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    times: list[float] = []
    for _ in range(REPLAYS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[1:])
