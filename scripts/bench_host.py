"""Python's own time of a call that launches kernels, for the benchmarks of kernels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch


def host_us(run: Callable[[], object], seconds: float = 0.4) -> float:
    """Microseconds of a call, nothing waited for: the best of short runs that leave the queue room.

    Over a while: what else runs on the machine made the best of 40 ms twice as long in one run of two.
    """
    best = math.inf
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            run()
        best = min(best, (time.perf_counter() - begin) / 20 * 1e6)
    return best
