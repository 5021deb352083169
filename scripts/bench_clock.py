"""Times of calls on sets of inputs that take turns, by a GPU's clock, for the benchmarks of kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Arm = Callable[[Any], object]
"""A call on one set of inputs."""


def median_us(run: Callable[[], object], calls: int, seconds: float = 0.2) -> float:
    """Median time of a run by the device's clock, divided by the calls in it, in microseconds."""
    run()
    torch.cuda.synchronize()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < until and len(times) < 200):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def time_eager(arm: Arm, sets: Sequence[Any]) -> float:
    """What a call costs among many: the larger of Python's time and the kernels'."""
    rounds = max(1, 40 // len(sets))

    def run() -> None:
        for _ in range(rounds):
            for one in sets:
                arm(one)

    return median_us(run, rounds * len(sets))


def time_graph(arm: Arm, sets: Sequence[Any], seconds: float = 0.2) -> float:
    """The kernels alone: one graph of a call on each set, replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for one in sets[:2]:
            arm(one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for one in sets:
            arm(one)
    return median_us(graph.replay, len(sets), seconds)
